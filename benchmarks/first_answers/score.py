"""Answers before the first run, compared with public launches that no table of the package has.

    python benchmarks/first_answers/score.py [--only TEXT]

``lines.json`` in this folder lists launches by others: the command as published, or Megatron's
spelling of its description, the device, the measured step and, if known, the peak of memory.  Each
was written down before it was predicted.  For every one ``forerun predict --device D --json --
LINE`` is run as a user would run it; a table lists the answers, and the last lines count how many
held.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table

LINES = Path(__file__).with_name("lines.json")
HEAD = ("launch", "device", "measured, s", "predicted, s", "error, %", "inside?", "memory, GB")
Launch = Mapping[str, Any]
"""A public launch; ``from`` quotes its source, and says how the step was derived from it."""
Answer = Mapping[str, Any]
"""Printed by ``predict``; else its ``refusal``."""


def main() -> int:
    """Predict every line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="launches with this in the name")
    only = parser.parse_args().only
    answers = [(launch, ask(launch)) for launch in read_launches() if only in launch["name"]]
    print(markdown_table(HEAD, [_cells(*one) for one in answers]))
    print(f"\n{summary(answers)}")
    return 0 if answers else 1


def read_launches() -> list[Launch]:
    """Return all launches, in their order."""
    return json.loads(LINES.read_text(encoding="utf-8"))


def ask(launch: Launch) -> Answer:
    """Run the command line; return its answer."""
    command = [sys.executable, "-m", "forerun", "predict", "--device", launch["device"], "--json"]
    command += ["--", *shlex.split(launch["command"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"refusal": done.stderr.strip() or f"exit status {done.returncode}"}
    return json.loads(done.stdout)


def _cells(launch: Launch, answer: Answer) -> list[str]:
    cells = [launch["name"], launch["device"], f"{launch['measured_step_s']:.4g}"]
    if "refusal" in answer:
        return [*cells, f"refused: {answer['refusal']}", "-", "-", "-"]
    ends = f"{answer['low_s']:.4g} to {answer['high_s']:.4g}"
    memory = f"{answer['memory']['total_nbytes'] / 1e9:.1f}, {answer['verdict']}"
    return [
        *(*cells, f"{answer['step_time_s']:.4g} ({ends})"),
        f"{100 * error_frac(launch, answer):+.1f}",
        "yes" if is_inside(launch, answer) else "no",
        f"{memory} (measured {launch['measured_memory_gb'] or '-'})",
    ]


def error_frac(launch: Launch, answer: Answer) -> float:
    """Return predicted over measured step, minus 1."""
    return answer["step_time_s"] / launch["measured_step_s"] - 1


def is_inside(launch: Launch, answer: Answer) -> bool:
    """Return True if the interval contains the measured step."""
    return answer["low_s"] <= launch["measured_step_s"] <= answer["high_s"]


def summary(answers: Sequence[tuple[Launch, Answer]]) -> str:
    """Return errors, coverage and widths of the answers, and whether layouts fitted."""
    answered = [(launch, one) for launch, one in answers if "refusal" not in one]
    if not answered:
        return f"{len(answers)} refused"
    errors = [abs(error_frac(*one)) for one in answered]
    widths = [(one["high_s"] - one["low_s"]) / 2 / one["step_time_s"] for _, one in answered]
    verdicts = [(launch["memory_verdict"], one["verdict"]) for launch, one in answered]
    judged = [stated == verdict for stated, verdict in verdicts if stated is not None]
    return "\n".join(
        (
            f"median absolute error: {100 * median(errors):.1f} %",
            f"held: {sum(is_inside(*one) for one in answered)} of {len(answered)}",
            f"half-width: largest {100 * max(widths):.0f} %, median {100 * median(widths):.0f} %",
            f"memory verdicts right: {sum(judged)} of {len(judged)}",
            f"{len(answers) - len(answered)} refused",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
