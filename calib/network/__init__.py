"""Transfer times: curves over bytes, NCCL's own choices, other groups and systems.

In: measured transfers. Out: times of collectives. Imports ``workload`` and ``regressors``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .cluster import (
        LINK_SIGMA_LOG,
        host_copy_s,
        host_rates,
        known_network,
        link_figures,
        network_line,
        stated_network,
        with_domains_as_nodes,
    )
    from .collective_times import CollectiveModel, Transfers, fit_collectives, fit_transfers
    from .curves import Law, Samples, fit_law
    from .groups import Group, Measured, bus_factor, canonical, group_of, num_nodes, ring_steps
    from .nccl_tuner import tuner_time_s
    from .once_per_node import as_all_to_all
    from .systems import REACHED_FRAC, NetworkPrior, network_prior

__getattr__ = lazy_getattr(__name__)
