"""Probes: operators and transfers timed on purpose, in pauses of training or on an idle machine.

In: a list of probes. Out: records.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .probe_sweep import Sweep, copy_bytes_per_s
    from .probes import Probing

__getattr__ = lazy_getattr(__name__)
