"""Answers before the first run, compared with public launches that no table of the package has.

    python benchmarks/first_answers/score.py [--only TEXT] [--lines JSON] [--json OUT]

``lines.json`` in this folder lists launches by others: the command as published, or Megatron's
spelling of its description, the device, the measured step and, if known, the peak of memory.  Each
was written down before it was predicted.  For every one the command line ``forerun predict --device
D --json -- LINE`` is run as a user would run it; a table lists the answers, and the last lines
count how many held.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table

LINES = Path(__file__).with_name("lines.json")
ANSWER_LIMIT_S = 300
HEAD = (
    *("launch", "device", "measured, s", "predicted, s", "90 % interval", "error, %", "inside?"),
    *("half-width, %", "memory, GB (measured)", "verdict (right?)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A public launch with a measured step; fields as in ``lines.json``."""

    name: str
    source: str
    device: str
    """Short name of ``forerun`` for the device."""
    command: str
    measured_step_s: float
    how: str
    """Quote of the source, and how the step was derived from it (``from`` in the file)."""
    measured_memory_gb: float | str | None
    memory_verdict: str | None
    assumed: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Return the command as a shell splits it."""
        return shlex.split(self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of ``predict`` for a launch."""

    launch: Launch
    wall_s: float
    refusal: str = ""
    """Standard error if there is no answer."""
    step_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    memory_gb: float = 0.0
    verdict: str = ""

    @property
    def error_frac(self) -> float:
        """Predicted over measured step, minus 1."""
        return self.step_s / self.launch.measured_step_s - 1

    @property
    def is_inside(self) -> bool:
        """True if the interval contains the measured step."""
        return self.low_s <= self.launch.measured_step_s <= self.high_s

    @property
    def half_width_frac(self) -> float:
        """Half of the interval over the prediction."""
        return (self.high_s - self.low_s) / 2 / self.step_s

    @property
    def is_verdict_right(self) -> bool | None:
        """True if the memory verdict was right; None if the outcome is unknown."""
        expected = self.launch.memory_verdict
        if expected is None:
            return None
        return self.verdict == expected


def main() -> int:
    """Predict every line and print the table."""
    arguments = _arguments()
    launches = [one for one in read_launches(arguments.lines) if arguments.only in one.name]
    answers = [ask(launch) for launch in launches]
    print(table(answers))
    print(f"\n{summary(answers)}")
    for one in answers:
        if one.refusal:
            print(f"\n{one.launch.name} was refused: {one.refusal}")
    if arguments.json:
        text = json.dumps([asdict(one) for one in answers], indent=1)
        arguments.json.write_text(f"{text}\n", encoding="utf-8")
    return 0 if answers else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="launches with this in the name")
    parser.add_argument("--lines", type=Path, default=LINES, help="another file of launches")
    parser.add_argument("--json", type=Path, metavar="OUT", help="every answer")
    return parser.parse_args()


def read_launches(path: Path = LINES) -> list[Launch]:
    """Return all launches of a file, in its order."""
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [
        Launch(how=entry.pop("from"), assumed=tuple(entry.pop("assumed")), **entry)
        for entry in entries
    ]


def ask(launch: Launch) -> Answer:
    """Run the command line; return its answer and the wall time from process start."""
    command = [sys.executable, "-m", "forerun", "predict", "--device", launch.device, "--json"]
    begin_s = time.perf_counter()
    done = subprocess.run(
        [*command, "--", *launch.words],
        capture_output=True,
        text=True,
        check=False,
        timeout=ANSWER_LIMIT_S,
    )
    wall_s = time.perf_counter() - begin_s
    if done.returncode:
        refusal = done.stderr.strip() or f"exit status {done.returncode}"
        return Answer(launch=launch, wall_s=wall_s, refusal=refusal)
    return answer_from(launch, json.loads(done.stdout), wall_s)


def answer_from(launch: Launch, answer_json: dict[str, Any], wall_s: float) -> Answer:
    """Parse the JSON that ``predict`` prints."""
    return Answer(
        launch=launch,
        wall_s=wall_s,
        step_s=answer_json["step_time_s"],
        low_s=answer_json["low_s"],
        high_s=answer_json["high_s"],
        memory_gb=answer_json["memory"]["total_nbytes"] / 1e9,
        verdict=answer_json["verdict"],
    )


def table(answers: Sequence[Answer]) -> str:
    """Return a Markdown table with a row for each launch."""
    return markdown_table(HEAD, [_cells(one) for one in answers])


def _cells(one: Answer) -> list[object]:
    launch = one.launch
    cells = [launch.name, launch.device, f"{launch.measured_step_s:.4g}"]
    if one.refusal:
        return [*cells, "refused", *["-"] * (len(HEAD) - len(cells) - 1)]
    measured_gb = "-" if launch.measured_memory_gb is None else launch.measured_memory_gb
    right = {True: "yes", False: "no", None: "-"}
    return [
        *cells,
        f"{one.step_s:.4g}",
        f"{one.low_s:.4g} to {one.high_s:.4g}",
        f"{100 * one.error_frac:+.1f}",
        right[one.is_inside],
        f"{100 * one.half_width_frac:.0f}",
        f"{one.memory_gb:.1f} ({measured_gb})",
        f"{one.verdict} ({right[one.is_verdict_right]})",
    ]


def summary(answers: Sequence[Answer]) -> str:
    """Return errors, coverage, widths and response times of the answers."""
    answered = [one for one in answers if not one.refusal]
    wall_s = median([one.wall_s for one in answers]) if answers else 0.0
    last = f"median wall time of an answer: {wall_s:.2f} s; {len(answers) - len(answered)} refused"
    if not answered:
        return last
    errors = [abs(one.error_frac) for one in answered]
    widths = [one.half_width_frac for one in answered]
    judged = [one for one in answered if one.is_verdict_right is not None]
    return "\n".join(
        (
            f"median absolute error: {100 * median(errors):.1f} %",
            f"held: {sum(one.is_inside for one in answered)} of {len(answered)}",
            f"half-width: largest {100 * max(widths):.0f} %, median {100 * median(widths):.0f} %",
            f"memory verdicts right: {sum(map(_is_right, judged))} of {len(judged)}",
            last,
        )
    )


def _is_right(one: Answer) -> bool:
    return one.is_verdict_right is True


if __name__ == "__main__":
    sys.exit(main())
