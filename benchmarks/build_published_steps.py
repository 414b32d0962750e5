"""Published step times in our own format, for ``recipes/published``.

    python benchmarks/build_published_steps.py TABLE... --out DIR

Each TABLE that ``forerun validate steps`` reads becomes ``DIR/steps_<name>.csv.gz``, flagged rows
included.  Gzip without a time stamp, so that the same rows give the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from forerun.calib.published.steps import read_steps
from forerun.calib.published.steps_own import own_frame


def main() -> None:
    parser = argparse.ArgumentParser(description="Published step times in our own format.")
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="public table, CSV")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    for path in arguments.tables:
        name = path.name.split(".")[0].removeprefix("e2e_")
        table = read_steps(pd.read_csv(path, low_memory=False), path.name)
        out = arguments.out / f"steps_{name}.csv.gz"
        own_frame(list(table.rows)).to_csv(
            out, index=False, compression={"method": "gzip", "mtime": 0}
        )
        print(f"{out.name}: {len(table.rows)} rows, {len(table.skipped)} skipped")


if __name__ == "__main__":
    main()
