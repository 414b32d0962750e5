"""``steps.parquet``: the steps that a companion saw, beside what was said of each before it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ...calib.records import replace_by
from ...calib.samples import check_parquet
from .publishing import Place
from .run_folders import paths_of
from .run_log import RunLog, SeenStep

STEPS = "steps.parquet"
SCHEMA = 1
_SCHEMA_KEY, _RUN_KEY = b"forerun_schema", b"forerun_run_id"


def write_steps(place: Place, run_log: RunLog) -> None:
    """Replace the file of a run at once; of a long run the steps are evenly spread."""
    columns = {
        name: [getattr(one, name) for one in run_log.seen] for name in SeenStep.__dataclass_fields__
    }
    whole = pa.table(columns).replace_schema_metadata(
        {_SCHEMA_KEY: str(SCHEMA).encode(), _RUN_KEY: place.run_id.encode()}
    )
    replace_by(place.path / STEPS, lambda file: pq.write_table(whole, file, compression="zstd"))


def read_steps(directory: Path, run_id: str) -> pd.DataFrame | None:
    """The steps of a run, a column for each field of ``SeenStep``.

    None where nobody wrote them down; a damaged file, one of a newer schema and one of another run
    are passed over.
    """
    for path in paths_of(directory, STEPS):
        try:
            check_parquet(path)
            whole = pq.read_table(path)
            said = whole.schema.metadata or {}
            if said.get(_RUN_KEY) != run_id.encode() or int(said[_SCHEMA_KEY]) > SCHEMA:
                continue
            return whole.select(list(SeenStep.__dataclass_fields__)).to_pandas(ignore_metadata=True)
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            continue
    return None
