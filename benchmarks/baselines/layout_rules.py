"""Rules that choose a layout without a model: what people follow who measure nothing.

Each says an order of layouts of one job, as numbers of which the least is chosen; all layouts that
come in question fit in memory, since they were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.calib.workload import RunConfig

USUAL_NODE = 8
"""GPUs of a node where nobody said: DGX and HGX have eight."""

Rule = Callable[[Sequence[RunConfig]], NDArray[np.float64]]


def least_split(configs: Sequence[RunConfig]) -> NDArray[np.float64]:
    """Order of the trivial rule: smallest TP x PP that fits, then the largest micro-batch.

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
    """Order of Narayanan et al. (SC 2021, takeaways 1 and 2): TP no wider than a node.

    First the smallest TP x PP that fits, so that most ranks are replicas (2); of these the one with
    most TP within a node, PP for the rest (1).  Their third, that the best micro-batch depends on
    the model, is no rule: the largest that fits, as is usual.
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
    """Place of each key among the distinct ones, from 0."""
    distinct = {key: place for place, key in enumerate(sorted(set(keys)))}
    return np.array([distinct[key] for key in keys], dtype=np.float64)
