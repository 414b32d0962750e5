"""Operators and transfers timed on purpose, in pauses of training or on an idle machine.

In: a list of probes. Out: records.
"""

from typing import TYPE_CHECKING

from ...faces import names_on_demand

if TYPE_CHECKING:
    from .probe_sweep import Sweep, copy_bytes_per_s
    from .probes import Probing

__getattr__ = names_on_demand(__name__)
