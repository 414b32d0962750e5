"""Hand-chosen numbers of the models, which a sensitivity run varies and a test counts.

Every module-level number of the rooms is one, except for those listed here with their origin: data
sheets and other people's sources, counts, units, and guards that keep sums finite or searches
bounded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("network", "fit", "steps", "regressors")
NOT_CHOSEN: Mapping[str, str] = {
    "NCCL's tuning.cc and its search for channels": """
        network.nccl_tuner: _BASE_US _HOP_US _POST_US _LL_BYTES_PER_S _LL_NETWORK_BYTES_PER_S
        _LL128_CHANNEL _TREE_CHANNEL _NVLS_LEAST_RANKS _SEND_CHANNELS _CHANNEL_SENDS
        _CARD_CHANNELS
        network.collective_times: _SHORT_NBYTES
        network._extrapolation: _TREE_BASE_S _TREE_LOCAL_HOP_S""",
    "data sheets, specifications and measurements of others": """
        network.once_per_node: _LATENCY_S
        network.nccl_tuner: _PAIR_RING_FRAC
        steps.base_times: _MMA_FRAC _FLASH_2_FRACS
        network.cluster: SLOT_BYTES_PER_S _C2C _SHARED_C2C
        network.cluster: _SLOT_GENERATIONS
        network.systems: _VOLTA _AMPERE _HOPPER _CUT_HOPPER _BLACKWELL _CDNA3 _CDNA4 _FASTER_CARDS
        _RACK _PRIORS _LAUNCHES_S LATENCY_SIGMA_LOG
        network._topology: _MESH_PEERS _CUBE_OCTAVES _CARDS _USUAL_GPUS
        fit.priors: _GPUS _CPU _UNKNOWN _NVIDIA _CDNA3 _CDNA4 _GENERATIONS _OTHER
        _TF32_YEAR
        fit.laws: _CACHE_NBYTES
        steps._scales: _SERVERS _GRACE
        steps._operator_tables: _CARDS""",
    "counts of what frameworks and kernels do": """
        fit.operator_kinds: _FP32_NBYTES _TILE _HEAD_TILE _OPTIMIZER_PASSES _OPTIMIZER_FLOP
        _OPTIMIZER_LAUNCHES SHARDED_CALL_LAUNCHES SHARD_UNIT_LAUNCHES HOST_UPDATE_NBYTES
        _LINEAR_LAUNCHES _LINEAR_BACKWARD_LAUNCHES _SORTED_IDS _SORT_LAUNCHES _CACHED_NBYTES
        _UNCACHED_NBYTES _UNCACHED_FACTOR _LAYER_PASSES _ATTENTION _LINEAR _HOST KINDS
        fit._pools: _TILES _ATTENTION_ROWS _HEAD_TILE
        steps.base_times: _KERNEL_S _RATE_FRAC _FP32_NBYTES _COUNTED
        steps._scales: OPTIMIZER_NBYTES ADAM_NBYTES COPIED_NBYTES""",
    "measured by us, in benchmarks/RESULTS.md": """
        steps.launches: HOST_SCATTER_LOG
        steps.live: _UNSEEN_HOST_LOG
        fit.calibration: _ROWS_SIGMA_LOG""",
    "units, names of versions, quantiles of known distributions": """
        network.cluster: _GIGA
        network.curves: _LOG_2
        network.nccl_tuner: _US _GIGA
        network.systems: _GIGA
        fit.calibration: SCHEMA
        fit.priors: _TERA _GIGA
        fit.rate_priors: _LAUNCH_S
        steps.live: IN_SITU
        steps.base_times: _MEASURED_TRANSFERS
        steps.model: ERROR_INFLATION
        steps._operator_tables: _GIGA
        regressors.gaussian: _SQRT_3
        regressors.robust: Z_90 STUDENT_90
        regressors.trees: _SEED _LEAF""",
    "rounding, and bounds of searches": """
        network.curves: _ITERATIONS _LARGEST_STEP_LOG _LEAST_STEP_LOG _FAR_LOG_NBYTES
        network.collective_times: _MOST_COMPARED
        network._extrapolation: _LARGE_NBYTES
        fit.calibration: _TOUCHING_OCTAVES
        fit._pools: _DECIMALS
        fit._rates: _LEAST _MOST_ROWS
        fit.machine: _MOST_ROWS
        fit._sharded_host: _GRID
        steps.base_times: _FASTEST_S
        steps.estimate: _ROUNDING
        steps.slices: _LEAST_FRAC _LEAST_S
        steps._layouts: _LEAST_S _RUN
        steps.launches: _ROUNDS
        steps._operator_tables: _MAX_ROWS
        steps._posterior: SLOPE_STEP _WIDE_SPREADS _WIDE_STEPS _NUM_DISCREPANCIES _WILD_ROUNDS
        steps._posterior: LEVEL_SIGMA_LOG
        steps._priced_items: _FASTEST_S _INSIDE_S
        steps._operator_tables: _MAX_TRANSFER_ROWS
        regressors.robust: _ALIKE _ALIKE_FRAC _BITS
        regressors.gaussian: _FARTHEST _ALIKE_LOG _JITTER_FRACS _SEARCH _MOST_TUNED
        regressors.robust: _FARTHEST_LOG _INSIDE_LOG
        regressors.trees: _ROUNDING _NUM_FOLDS _LEAST_DEVIATION""",
}
"""Numbers that were not chosen, by origin: ``<room>.<module>: NAME NAME ...``."""


def chosen(calib: Path) -> list[tuple[str, str]]:
    """Return module and name of every chosen number below the package's ``calib``."""
    known = set(not_chosen())
    return [one for one in numbers(calib) if one not in known]


def not_chosen() -> Iterator[tuple[str, str]]:
    """Yield module and name of every number that is listed with its origin."""
    module = ""
    for word in " ".join(NOT_CHOSEN.values()).split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            yield module, word


def numbers(calib: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every constant of the rooms whose value contains a number."""
    for folder in PACKAGES:
        for path in sorted((calib / folder).glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                yield from ((f"{folder}.{path.stem}", name) for name in _names(node))


def _names(node: ast.stmt) -> list[str]:
    """Return the upper-case names to which a statement assigns something with a number in it."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = list(node.targets)
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []
    if node.value is None or not any(map(_is_number, ast.walk(node.value))):
        return []
    names = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return [one.id for one in names if one.id.isupper()]


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)
