"""Launch lint: arguments and variables of a launch that waste time or memory, distort what is
measured, or put the run at risk; what to write instead, and what the run's model says of it."""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .linter import Flaw, Lint, lint
    from .pricing import Pricing
    from .rule import stated_launch

__getattr__ = lazy_getattr(__name__)
