"""What a verb costs on a calibrated run, beside importing the packages that tables are read with.

    python benchmarks/verbs.py quickstart-out [--repetitions 5]

Processor time (user and system) of whole processes, the least of the repetitions; the reference is
``import pandas, pyarrow`` in the same run.  The first answer fits and keeps the fit, the others
read it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_head, markdown_row

OVER_BAR_S = 0.5
FORERUN = (sys.executable, "-m", "forerun")


def main() -> None:
    """Print a row for each verb."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    home = str(arguments.directory)
    verbs = {
        "import pandas, pyarrow": (sys.executable, "-c", "import pandas, pyarrow"),
        "predict": (*FORERUN, "predict", home, "--tensor-model-parallel-size", "2"),
        "plan": (*FORERUN, "plan", home),
        "compare": (*FORERUN, "compare", home),
    }
    for kept in arguments.directory.glob("fitted-*.json"):
        kept.unlink()
    first_s = {name: process_s(argv) for name, argv in verbs.items()}
    print(markdown_head(("what", "first s", "least s", "over the import s", "bar s")))
    least_s = {name: float("inf") for name in verbs}
    for _ in range(arguments.repetitions):
        for name, argv in verbs.items():
            least_s[name] = min(least_s[name], process_s(argv))
    reference_s = least_s["import pandas, pyarrow"]
    for name, time_s in least_s.items():
        figures = (f"{first_s[name]:.2f}", f"{time_s:.2f}", f"{time_s - reference_s:+.2f}")
        print(markdown_row([name, *figures, OVER_BAR_S]))


def process_s(argv: tuple[str, ...]) -> float:
    """Seconds of processor time of one process with its children; it must answer."""
    before = os.times()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    user_s = after.children_user - before.children_user
    return user_s + after.children_system - before.children_system


if __name__ == "__main__":
    main()
