"""The raw tables of estimate-train-time (arXiv:2509.22832), which name GPU and operator in the
file's name only: ``<gpu>_<operator>_<type>[_<nodes>_<gpus per node>].csv``."""

from __future__ import annotations

import re

import pandas as pd

from forerun.benchmarks.published.collectives import read_ett
from forerun.benchmarks.published.columns import element_nbytes, numbers
from forerun.benchmarks.published.operators_ett import read_operators, read_optimizers
from forerun.calib.errors import ConfigError

_NAME = re.compile(r"(?P<gpu>[^_]+)_(?P<op>.+?)_(?P<dtype>fp16|bf16|fp32)(?:_\d+_\d+)?$")
_COLUMNS = {
    "mp": "tp",
    "b": "micro_batch",
    "h": "heads",
    "l": "seq_len",
    "dim": "hidden",
    "hidden_size": "hidden",
    "num_layers": "layers",
    "F_dur(us)": "fwd_time_us",
    "B_dur(us)": "bwd_time_us",
    "dur(us)": "time_us",
    "dur": "time_us",
    "GPUsPerNode": "ranks_per_node",
}
_TIMES = ("F_dur(us)", "dur(us)", "dur")
_SWEEPS = ("allreduce", "allgather", "reducescatter", "p2p")


def is_summary(frame: pd.DataFrame) -> bool:
    """True for the tables of trained models that lie beside the measurements."""
    return "Best_model" in frame.columns


def is_raw(frame: pd.DataFrame) -> bool:
    """True where the times are named as the source names them."""
    return any(name in frame.columns for name in _TIMES)


def paper_table(frame: pd.DataFrame, stem: str, *, cluster: str) -> pd.DataFrame:
    """The rows of operators or collectives in our own format.

    ``ConfigError`` where ``stem`` is not such a name.
    """
    found = _NAME.fullmatch(stem)
    if found is None:
        raise ConfigError(
            f"{stem} is not named <gpu>_<operator>_<type>; keep the names of the source"
        )
    table = frame.rename(columns=_COLUMNS).assign(
        gpu=found["gpu"], cluster=cluster, dtype=found["dtype"], op=found["op"]
    )
    if "fwd_time_us" in table.columns:
        return read_operators(table)
    if "shape" not in table.columns:
        return read_optimizers(table)
    name = next((sweep for sweep in _SWEEPS if found["op"].startswith(sweep)), found["op"])
    ranks = numbers(table, "nodes") * numbers(table, "ranks_per_node")
    nbytes = numbers(table, "shape") * element_nbytes(table)
    return read_ett(table.assign(op=name, ranks=ranks, bytes_per_rank=nbytes))
