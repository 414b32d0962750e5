"""Convert published tables to the format that ``forerun import`` reads.

    python benchmarks/published/convert.py TABLE... --out DIR [--packed]

The kind of a TABLE is known by its columns (CSV, gzipped CSV or Parquet; a folder stands for all of
its tables).  Each becomes ``DIR/<name>.csv``, including flagged rows.  ``--packed`` writes step
times as in ``recipes/published``: ``steps_<name>.csv.gz`` without a time stamp, so that equal rows
give equal files.  Exit codes are those of ``forerun``.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from forerun.benchmarks.published.readers import is_of_steps, read_published, read_steps
from forerun.calib.errors import CalibrationError, ConfigError, ForerunError, RecordError
from forerun.calib.importers.canonical_steps import canonical_frame
from forerun.calib.records.files import replace_file
from forerun.launch.known.table_files import ENDINGS, read_frame
from forerun.launch.verbs.arguments import ExitCode

_UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def main() -> int:
    """Convert every table, or print in one line why not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="table or folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--packed", action="store_true", help="step times as in recipes/published")
    try:
        return _converted(parser.parse_args())
    except (RecordError, CalibrationError) as err:
        print(f"convert.py: {err}", file=sys.stderr)
        return ExitCode.NO_DATA
    except (ForerunError, OSError) as err:
        print(f"convert.py: {err}", file=sys.stderr)
        return ExitCode.USAGE


def _converted(arguments: argparse.Namespace) -> int:
    written: dict[Path, int] = {}
    for path in _files(arguments.tables):
        stem, frame = path.name.split(".")[0], read_frame(path)
        if is_of_steps(frame):
            table = _checked(path, read_steps, frame, path.name)
            for row in table.skipped:
                print(f"convert.py: {path.name} {row.row_id}: {row.reason}", file=sys.stderr)
            if not table.rows:
                raise RecordError(f"{path} has no row that is a layout; give one with its sizes")
            name = (
                f"steps_{stem.removeprefix('e2e_')}.csv.gz" if arguments.packed else f"{stem}.csv"
            )
            _write(canonical_frame(list(table.rows)), arguments.out / name, written)
        else:
            checked = _checked(path, read_published, frame, path.name)
            _write(checked, arguments.out / f"{stem}.csv", written)
    if not written:
        raise RecordError(f"nothing to convert in {', '.join(map(str, arguments.tables))}")
    for path, num_rows in written.items():
        print(f"{path}: {num_rows} rows")
    return ExitCode.ANSWER


def _files(tables: list[Path]) -> Iterator[Path]:
    for path in tables:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS))
        else:
            yield path


def _checked(path: Path, read, *arguments, **more):
    """Return a reader's result; report an unexpected value in one line, too."""
    try:
        return read(*arguments, **more)
    except ForerunError:
        raise
    except _UNEXPECTED as err:
        why = f"{type(err).__name__}: {str(err)[:100]}"
        raise RecordError(f"{path} is no table that can be read ({why})") from err


def _write(frame: pd.DataFrame, path: Path, written: dict[Path, int]) -> None:
    if path in written:
        raise ConfigError(f"{path} would be written twice; convert tables of one name apart")
    text = frame.to_csv(index=False)
    data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text
    replace_file(path, data)
    written[path] = len(frame)


if __name__ == "__main__":
    sys.exit(main())
