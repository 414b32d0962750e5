"""Launch lint: arguments and variables of a launch that waste time or memory, distort what is
measured, or put the run at risk; what to write instead, and what the run's model says of it."""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .linter import Flaw, Lint, lint
    from .pricing import Pricing
    from .rule import stated_launch

__getattr__ = names_on_demand(__name__)
