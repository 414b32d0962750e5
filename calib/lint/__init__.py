"""Launch lint: arguments and variables that waste time or memory, distort measurements, or put the
run at risk; with their replacements and modelled gains."""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .linter import Flaw, Lint, lint
    from .pricing import Pricing
    from .rule import stated_launch

__getattr__ = lazy_getattr(__name__)
