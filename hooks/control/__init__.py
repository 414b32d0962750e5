"""Agreement among ranks: orders from the companion, proposals, and the link to it.

In: lines of the companion. Out: one decision that is the same on every rank.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .companion_link import SETTINGS_FD
    from .live import Live
    from .orders import CALM_PAUSE_S, Orders

__getattr__ = lazy_getattr(__name__)
