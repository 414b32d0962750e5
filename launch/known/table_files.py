"""Tables of measurements: in files, imported into a directory, and published.

Imported tables define a machine without a calibration here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow as pa

from ...calib.answers.answer import Answer
from ...calib.answers.transcript import with_prefix
from ...calib.differences.norms import normal
from ...calib.errors import CalibrationError, ConfigError, ForerunError, RecordError
from ...calib.fit.priors import device_prior, is_processor
from ...calib.importers.canonical_steps import REQUIRED, canonical_frame, read_steps
from ...calib.importers.canonical_tables import NEEDED, read_table, table_kind, unknown_table_error
from ...calib.records.files import CREATED, replace_by, write_text
from ...calib.records.step_rows import StepRow
from ...calib.samples.store import check_parquet
from ...calib.steps.known_steps import KnownStep
from ...calib.workload.config import RunConfig
from ...calib.workload.operators import OperatorKind

ENDINGS = (".csv", ".csv.gz", ".parquet")
IMPORTED = "imported"
"""Subfolder for imported tables, as CSV in our format."""
FOLDER = Path(__file__).parents[2] / "recipes" / "published"
_SIMULATED = "steps_vtrain_single_node.csv.gz"
_MOST_NAMED = 3
"""Maximum number of machines that an error message lists."""
_STEPS = "steps"


def read_frame(path: Path) -> pd.DataFrame:
    """Return the rows of a table file.

    Raises ``ConfigError`` if the file is missing, unreadable or of another format, and
    ``CalibrationError`` if it is empty.
    """
    if not path.name.endswith(ENDINGS):
        raise ConfigError(f"{path} is not a table; give a file that ends in {', '.join(ENDINGS)}")
    try:
        if path.suffix == ".parquet":
            check_parquet(path)
            return pd.read_parquet(path)
        return pd.read_csv(path, low_memory=False)
    except FileNotFoundError as err:
        raise ConfigError(f"{path} does not exist; give the path of a table") from err
    except pd.errors.EmptyDataError as err:
        raise CalibrationError(f"{path} has no rows; give a table with measurements") from err
    except (OSError, EOFError, ValueError, TypeError, RecursionError, pa.ArrowException) as err:
        first = " ".join(str(err).split())[:200]
        raise ConfigError(f"{path} cannot be read ({first}); give a complete file") from err


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a table, with a column that says whose it is, in the format of the file name's
    extension; raise as ``replace_file`` does."""
    check_ending(path)
    frame = frame.assign(**CREATED)
    if path.suffix == ".parquet":
        replace_by(path, lambda file: frame.to_parquet(file, index=False))
    else:
        write_text(path, frame.to_csv(index=False))


def check_ending(path: Path) -> None:
    """Raise ``ConfigError`` if the extension is not that of a table."""
    if not path.name.endswith(ENDINGS):
        raise ConfigError(
            f"--out {path} is not a table; give a name that ends in {', '.join(ENDINGS)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedTables:
    """All tables imported into a directory."""

    steps: tuple[StepRow, ...] = ()
    """Rows without a flag, in order of files and lines."""
    operators: tuple[pd.DataFrame, ...] = ()
    collectives: tuple[pd.DataFrame, ...] = ()
    problems: tuple[str, ...] = ()

    def known(self, running: RunConfig) -> tuple[KnownStep, ...]:
        """Return rows on the run's kind of device as evidence; each machine is a separate site."""
        wanted = device_prior(running.device).name
        alike = [row for row in self.steps if device_prior(row.config.device).name == wanted]
        return tuple(KnownStep.of(row, site=row.machine) for row in alike)

    def machine(self, name: str | None) -> tuple[StepRow, ...]:
        """Return the rows of a machine; ``ConfigError`` if its name is unknown, or needed."""
        names = list(dict.fromkeys(row.machine for row in self.steps))
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            known = ", ".join(repr(one) for one in names[:_MOST_NAMED]) or "none at all"
            known += f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise ConfigError(
                f"--machine {name!r} is not among the imported machines; choose from {known}"
                if name is not None
                else f"steps of {len(names)} machines were imported; choose with --machine {known}"
            )
        return tuple(row for row in self.steps if row.machine == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of importing a table."""

    path: Path
    num_rows: int
    skipped: tuple[str, ...] = ()
    """Rows that define no valid layout, and unused columns, with the reason."""


def import_table(path: Path, directory: Path) -> Written:
    """Import a table of steps, operators or collectives into a directory.

    A table of the same name is replaced.  Raises ``ConfigError`` if its columns fit none of these.
    """
    frame, name = read_frame(path), path.name.partition(".")[0]
    columns = frozenset(map(str, frame.columns))
    known = {_STEPS: REQUIRED, **NEEDED}
    if columns and not any(columns >= needed for needed in known.values()):
        raise unknown_table_error(columns, path.name, known)
    if columns >= REQUIRED:
        table = read_steps(frame, path.name)
        skipped = tuple(f"{row.row_id}: {row.reason}" for row in table.skipped)
        if not table.rows:
            raise RecordError(f"{path} has no row that is a layout: {'; '.join(skipped[:3])}")
        skipped += tuple(f"the column {name}, which nothing reads" for name in table.unused)
        return _write(canonical_frame(list(table.rows)), directory, name, _STEPS, skipped)
    measured = read_table(frame, path.name)
    if "kind" in measured.columns and (measured["kind"] == OperatorKind.LAYER.value).any():
        raise ConfigError(
            f"{path.name} times whole layers, of which no step is made; give a table of operators"
        )
    return _write(measured, directory, name, table_kind(measured))


def read_imported(directory: Path) -> ImportedTables:
    """Read the tables of ``import_table``; damaged ones are reported and skipped."""
    frames: dict[str, list[pd.DataFrame]] = {what: [] for what in NEEDED}
    rows: list[StepRow] = []
    problems: list[str] = []
    for path in sorted((directory / IMPORTED).glob("*.csv")):
        what = path.stem.rpartition("-")[2]
        try:
            frame = read_frame(path)
            if what == _STEPS:
                table = read_steps(frame, path.name)
                rows += table.usable
                problems += [f"{path.name}, {r.row_id}: {r.reason}" for r in table.skipped]
            elif what in frames:
                measured = read_table(frame, path.name)
                frames[table_kind(measured)].append(measured)
        except (ConfigError, RecordError) as err:
            problems.append(f"{path.name} is skipped: {err}")
    return ImportedTables(
        steps=tuple(rows),
        operators=tuple(frames["operators"]),
        collectives=tuple(frames["collectives"]),
        problems=tuple(problems),
    )


def _write(
    frame: pd.DataFrame, directory: Path, name: str, what: str, skipped: Sequence[str] = ()
) -> Written:
    path = directory / IMPORTED / f"{name}-{what}.csv"
    write_frame(frame, path)
    return Written(path=path, num_rows=len(frame), skipped=tuple(skipped))


@cache
def published_rows() -> tuple[StepRow, ...]:
    """Return all published rows without a flag; simulator output is excluded."""
    paths = (path for path in sorted(FOLDER.glob("steps_*")) if path.name != _SIMULATED)
    return tuple(row for path in paths for row in read_steps(read_frame(path), path.name).usable)


def with_normal(answer: Answer, directory: Path) -> Answer:
    """Return the answer with a line on its rate among published ones; unchanged on a CPU or if
    nothing is published for its device."""
    measured = answer.measured
    if answer.modelled is None or is_processor(measured.device):
        return answer
    step = {"config": answer.modelled.config, "measured_s": measured.step_s}
    row = StepRow(table="", row_id="", group="", machine=measured.run_id, **step)
    with suppress(ForerunError):
        text = f"normal? {normal(row, published_rows()).sentence} · forerun normal {directory}"
        return replace(answer, transcript=(*answer.transcript, *with_prefix([text])))
    return answer
