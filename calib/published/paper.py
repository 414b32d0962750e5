"""The raw tables of estimate-train-time (arXiv:2509.22832), which name GPU and operator in the
file's name only: ``<gpu>_<operator>_<type>[_<nodes>_<gpus per node>].csv``."""

from __future__ import annotations

import re

import pandas as pd

from ..errors import ConfigError
from ..importers.columns import element_nbytes, numbers
from .collectives import read_ett
from .operators_ett import read_operators, read_optimizers

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
_SWEEPS = ("allreduce", "allgather", "reducescatter", "p2p")


def is_summary(frame: pd.DataFrame) -> bool:
    """True for the tables of trained models that lie beside the measurements."""
    return "Best_model" in frame.columns


def paper_table(frame: pd.DataFrame, stem: str, *, cluster: str) -> tuple[pd.DataFrame, bool]:
    """The rows in our own format, and whether they are operators (else collectives).

    ``stem`` is the file's name without its ending.  ``ConfigError`` where it is not such a name,
    or the columns are not those of the source.
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
        return read_operators(table), True
    if "shape" in table.columns:
        return _collectives(table, found["op"]), False
    if "time_us" in table.columns:
        return read_optimizers(table), True
    raise ConfigError(f"{stem} has none of the columns F_dur(us), dur(us), dur; is it measured?")


def _collectives(table: pd.DataFrame, sweep: str) -> pd.DataFrame:
    name = next((s for s in _SWEEPS if sweep.startswith(s)), sweep)
    ranks = numbers(table, "nodes") * numbers(table, "ranks_per_node")
    nbytes = numbers(table, "shape") * element_nbytes(table)
    return read_ett(table.assign(op=name, ranks=ranks, bytes_per_rank=nbytes))
