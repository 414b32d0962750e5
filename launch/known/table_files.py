"""Tables of measurements in files: CSV, gzipped CSV and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa

from ...calib.errors import CalibrationError, ConfigError
from ...calib.samples.store import check_parquet

ENDINGS = (".csv", ".csv.gz", ".parquet")


def read_frame(path: Path) -> pd.DataFrame:
    """The rows of a table file.

    ``ConfigError`` where the file is not there, cannot be read or is of another format,
    ``CalibrationError`` where it is empty.
    """
    if not path.name.endswith(ENDINGS):
        raise ConfigError(f"{path} is no table; give a file in {', '.join(ENDINGS)}")
    try:
        if path.suffix == ".parquet":
            check_parquet(path)
            return pd.read_parquet(path)
        return pd.read_csv(path, low_memory=False)
    except FileNotFoundError as err:
        raise ConfigError(f"{path} is not there; give the path of a table") from err
    except pd.errors.EmptyDataError as err:
        raise CalibrationError(f"{path} has no rows; give a table with measurements") from err
    except (OSError, EOFError, ValueError, TypeError, RecursionError, pa.ArrowException) as err:
        first = " ".join(str(err).split())[:200]
        raise ConfigError(f"{path} cannot be read ({first}); is it a whole file?") from err


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a table in the format that the name asks for."""
    check_ending(path)
    if path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    else:
        frame.to_csv(path, index=False)


def check_ending(path: Path) -> None:
    """``ConfigError`` where no table can be written under this name."""
    if not path.name.endswith(ENDINGS):
        raise ConfigError(f"--out {path} is no table; let it end in {', '.join(ENDINGS)}")


def table_names(paths: Sequence[Path]) -> list[str]:
    """How answers call the tables: by file name, by path where names are equal."""
    names = [path.name for path in paths]
    return [n if names.count(n) == 1 else str(p) for n, p in zip(names, paths, strict=True)]
