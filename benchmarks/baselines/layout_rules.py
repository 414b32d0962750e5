"""Rules that choose a layout without a model or any measurement, as practitioners do.

Each returns a rank for every layout of one job; the smallest is chosen.  All layouts passed in are
known to fit in memory, since they were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.calib.workload import RunConfig

USUAL_NODE = 8
"""GPUs per node if not stated: DGX and HGX have eight."""

Rule = Callable[[Sequence[RunConfig]], NDArray[np.float64]]


def least_split(configs: Sequence[RunConfig]) -> NDArray[np.float64]:
    """Rank layouts by the trivial rule: smallest TP x PP that fits, then the largest micro-batch.

    >>> from forerun.calib.workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> of = lambda tp, dp, micro: RunConfig(model=gpt, parallelism=Parallelism(tp=tp, dp=dp),
    ...     batch=Batch(micro_batch_size=micro, global_batch_size=8))
    >>> least_split([of(2, 2, 1), of(1, 4, 1), of(1, 4, 2)]).tolist()
    [2.0, 1.0, 0.0]
    """
    keys = [(c.parallelism.tp * c.parallelism.pp, -c.batch.micro_batch_size) for c in configs]
    return _places(keys)


def published_rule(configs: Sequence[RunConfig]) -> NDArray[np.float64]:
    """Rank layouts as Narayanan et al. (SC 2021, takeaways 1 and 2) do: TP no wider than a node.

    The smallest TP x PP that fits comes first, so that most ranks are replicas (takeaway 2); among
    these, the one with most TP within a node and PP for the rest (takeaway 1).  Their takeaway 3,
    that the best micro-batch depends on the model, is no rule; the largest that fits is used, as is
    usual.
    """
    keys = []
    for config in configs:
        par = config.parallelism
        is_wide = par.tp > (par.ranks_per_node or USUAL_NODE)
        keys.append((is_wide, par.tp * par.pp, -par.tp, -config.batch.micro_batch_size))
    return _places(keys)


RULES: Mapping[str, Rule] = {
    "smallest TP x PP, largest micro-batch": least_split,
    "Narayanan 2021": published_rule,
}


def _places(keys: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    """Return the rank of each key among the distinct keys, from 0."""
    distinct = {key: place for place, key in enumerate(sorted(set(keys)))}
    return np.array([distinct[key] for key in keys], dtype=np.float64)
