"""Answers of every verb on recorded runs, and what a companion makes of them, held against files.

    python benchmarks/golden_answers.py [--write]

Recorded runs are ``tests/golden/cpu_dp2``, that of a quick start, and four of Megatron-LM's own
``pretrain_gpt.py``: tensor, pipeline and expert parallel, and eight ranks; a table of published
steps is the seventh directory.  Each verb answers in this process, as JSON and as text on 80
columns; a companion plays each recorded run again, and its rows, tables, alerts, files and page are
kept.  With ``--write`` the answers are stored in ``tests/golden/answers``; without, each difference
is a line.  Numbers may differ by ``CLOSE_FRAC``, or by one in the last digit of a text, as
processors do.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

from forerun.benchmarks.golden_figures import FIGURES, figures
from forerun.benchmarks.golden_questions import FILES, LINES, LOG, QUESTIONS
from forerun.calib.workload.run_options import AutoSwitch, Goals
from forerun.hooks.process.settings import CompanionSettings, RankInfo, Settings
from forerun.launch.cli import main as forerun
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.sinks.sink import Sink

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
ANSWERS = GOLDEN / "answers"
PUBLISHED = ROOT / "recipes" / "published"
CLOSE_FRAC = 1e-6
NOW_UNIX_S = 1_796_100_000.0
"""The clock of all answers: some hours after the newest recording, 2026-12-01 04:40 UTC."""
MASKED = re.compile(r"^version$")
"""Keys whose values depend on the release that answers."""
PACKED = {
    "quick": "quickstart",
    **{name: f"megatron_{name}" for name in ("tp2", "pp2", "ep2", "mixed8")},
}
"""Archive of ``tests/golden`` for each recorded directory but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A recorded run as a companion is told of it."""

    source: str
    goals: Goals = field(default_factory=Goals)
    slower: float = 1.0
    """Factor of the times of the second half of its steps."""
    kept_frac: float = 1.0
    """Share of its steps after which it stops."""
    is_lost: bool = False
    """True if the companion ends without notice."""


MEASURED = {
    "h200": ("h200-2026-11-28", "h200-2026-11-28/megatron-lm-a", ""),
    "h200_small": ("h200-2026-11-28", "h200-2026-11-28/megatron-lm-b", ""),
    "h200_records": ("h200-2026-11-28-megatron", "megatron/b2-records", "records"),
}
"""Archive of ``benchmarks/gpu/measured``, its member, and where that belongs, by directory."""
REPLAYED = {
    **{name: Played(source=name) for name in PACKED},
    "late": Played(source="quick", goals=Goals(deadline_unix_s=1.0, gpus=(2, 4), mtbf_hours=20.0)),
    "costly": Played(
        source="tp2", goals=Goals(price_per_gpu_hour=2.5, budget_hours=0.02, restart_cost_s=1.0)
    ),
    "slowed": Played(source="quick", slower=1.6),
    "cut": Played(source="tp2", kept_frac=0.8),
    "lost": Played(source="mixed8", is_lost=True),
}


def main() -> int:
    """Run all verbs and replays, and write or compare; return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="these are the answers from now on")
    is_written = parser.parse_args().write
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as home, at_home(Path(home)):
        make_directories(Path(home))
        answers = ((name, ask(words)) for name, words in QUESTIONS.items())
        replays = ((f"replay_{name}", replay(name)) for name in REPLAYED)
        models = ((f"figures_{name}", figures(name)) for name in FIGURES)
        lines = ((f"lines_{name}", line_answers(name)) for name in LINES)
        for name, answer in chain(answers, replays, models, lines):
            if is_written:
                write(name, answer)
            else:
                differences += answer_differences(name, answer)
    count = len(QUESTIONS) + len(REPLAYED) + len(FIGURES) + len(LINES)
    done = "written" if is_written else "as they were"
    print("\n".join(differences) or f"{count} answers {done}")
    return 1 if differences else 0


@contextmanager
def at_home(home: Path) -> Iterator[None]:
    """Answer below ``home``, on 80 columns without colours."""
    before, environ = Path.cwd(), dict(os.environ)
    os.chdir(home)
    os.environ.update(COLUMNS="80", NO_COLOR="1")
    os.environ.pop("FORCE_COLOR", None)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environ)


def make_directories(
    home: Path, *, packed: Sequence[str] = tuple(PACKED), is_imported: bool = True
) -> None:
    """Make the directories of recorded runs under ``home``; if imported, also those of tables."""
    shutil.copytree(GOLDEN / "cpu_dp2", home / "cpu")
    for name in packed:
        with tarfile.open(GOLDEN / f"{PACKED[name]}.tar.gz") as file:
            file.extractall(home / name, filter="data")
    if not is_imported:
        return
    table = PUBLISHED / "steps_dgxc_scaling.csv.gz"
    _run(("import", "steps", str(table), "--out", "table"))
    _run(("import", "log", str(LOG), "--out", "logged"))
    for name, (archive, member, place) in MEASURED.items():
        with tarfile.open(ROOT / "benchmarks" / "gpu" / "measured" / f"{archive}.tar.gz") as file:
            file.extractall(home / "measured", filter="data")
        shutil.copytree(home / "measured" / member, home / name / place)
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")


def ask(words: Sequence[str]) -> dict[str, Any]:
    """Return exit code, JSON and text that a verb prints in the working directory."""
    place = words.index("--") if "--" in words else len(words)
    code, text, _ = _run((*words[:place], "--json", *words[place:]))
    answer = json.loads(text) if text.strip() else None
    _, shown, err = _run(words)
    return masked({"exit_code": code, "answer": answer, "text": (shown + err).splitlines()})


def line_answers(name: str) -> dict[str, Any]:
    """Return exit code and text of each command line of a set."""
    results = {line: _run(shlex.split(line)) for line in LINES[name]}
    return {
        _without_home(line): {"exit_code": code, "text": (out + err).splitlines()}
        for line, (code, out, err) in results.items()
    }


def _run(words: Sequence[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = forerun(words, clock=lambda: NOW_UNIX_S)
    return code, *(_without_home(stream.getvalue()) for stream in (out, err))


def _without_home(text: str) -> str:
    return text.replace(str(Path.cwd()), "HOME").replace(str(ROOT), "ROOT")


class Received(Sink):
    """Sink that keeps all that a W&B run would get."""

    def __init__(self) -> None:
        super().__init__("golden")
        self.rows: list[dict[str, Any]] = []
        self.all_tables: list[dict[str, Any]] = []
        self.alerts: list[str] = []
        self.summary: dict[str, Any] = {}

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the row of a step."""
        self.rows.append({"step": step, **values})

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Keep the tables of an answer."""
        self.all_tables.append({"step": step, **{k: list(rows) for k, rows in tables.items()}})

    def alert(self, title: str, text: str) -> None:
        """Keep an alert."""
        self.alerts.append(f"{title}: {text}")

    def close(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary."""
        self.summary = dict(summary)


def replay(name: str) -> dict[str, Any]:
    """Return what a companion logs, sends and writes while a recorded run is played to it again,
    and the status of its directory afterwards."""
    import pandas as pd

    played, directory = REPLAYED[name], Path(f"replay_{name}")
    shutil.copytree(Path(played.source) / "records", directory / "records")
    steps = pd.read_parquet(Path(played.source) / "steps.parquet").to_dict("records")
    received, log = Received(), io.StringIO()
    settings = _settings(directory, len(steps), played.goals)
    with redirect_stderr(log), redirect_stdout(log):
        kept = steps[: round(played.kept_frac * len(steps))]
        _play(CompanionLoop(settings, open_sink=lambda _: received), kept, played)
    page = next(iter(sorted(directory.rglob("report.html"))), None)
    answer = {
        "log": _without_home(log.getvalue()).splitlines(),
        "rows": received.rows,
        "tables": received.all_tables,
        "alerts": received.alerts,
        "summary": received.summary,
        "files": sorted(str(path.relative_to(directory)) for path in directory.rglob("*.*")),
        "page": html_text(page.read_text(encoding="utf-8")) if page else None,
        "status": ask(("status", str(directory))),
    }
    return masked(json.loads(json.dumps(answer)))


def _settings(directory: Path, num_steps: int, goals: Goals) -> CompanionSettings:
    run_id = next((directory / "records").iterdir()).name
    num_ranks = len(list((directory / "records" / run_id).glob("rank-*.jsonl")))
    rank = RankInfo(
        rank=num_ranks - 1, world_size=num_ranks, local_rank=0, local_world_size=num_ranks,
        run_id=run_id,
    )  # fmt: skip
    settings = Settings(
        rank=rank, directory=directory, wandb=AutoSwitch.OFF, total_steps=num_steps, goals=goals
    )
    return CompanionSettings(settings=settings, launch_id="golden-launch")


def _play(loop: CompanionLoop, steps: Sequence[Mapping[Any, Any]], played: Played) -> None:
    """Tell a companion of all steps as a session does, with the clock of the recording."""
    windows, late_s = set[int](), 0.0
    for index, row in enumerate(steps):
        factor = played.slower if 2 * index > len(steps) else 1.0
        time_s, window = factor * float(row["step_time_s"]), int(row["window"])
        late_s += time_s - float(row["step_time_s"])
        unix_s = float(row["unix_s"]) + late_s
        is_last = window >= 0 and (
            index + 1 == len(steps) or int(steps[index + 1]["window"]) != window
        )
        event = {
            "event": "step", "step": int(row["iteration"]) - 1, "time_s": time_s,
            "gap_s": 0.0, "is_hooked": bool(row["is_hooked"]),
            "window": window if window >= 0 else None,
            "is_after_window": bool(windows) and window < 0,
            "flags": str(row["flags"]).split(), "unix_s": unix_s,
        }  # fmt: skip
        loop.handle(event, unix_s)
        if is_last:
            windows.add(window)
            closed = {"event": "window_closed", "window": window, "last_step": event["step"]}
            loop.handle(closed, unix_s)
        loop.poll(unix_s + 1e-3)
    if not played.is_lost:
        last = int(steps[-1]["iteration"]) - 1
        loop.handle({"event": "end", "step": last, "unix_s": unix_s}, unix_s)
        loop.finish(unix_s)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden and (text := " ".join(data.split())):
            self.lines.append(text)


def html_text(page: str) -> list[str]:
    """Return each piece of text of a page, charts included, in its order."""
    parser = _Text()
    parser.feed(page)
    return parser.lines


def masked(value: Any) -> Any:
    """Return the value without what depends on the release."""
    if isinstance(value, dict):
        return {k: "masked" if MASKED.search(k) else masked(v) for k, v in value.items()}
    return [masked(one) for one in value] if isinstance(value, list) else value


def write(name: str, answer: Any) -> None:
    """Store an answer as what is expected from now on."""
    ANSWERS.mkdir(exist_ok=True)
    text = json.dumps(answer, indent=1, ensure_ascii=False)
    if name.startswith("figures_"):  # a row of numbers a line
        (key, rows), *_ = answer.items()
        text = f'{{"{key}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}"
    (ANSWERS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def answer_differences(name: str, answer: Any) -> list[str]:
    """Return a line for each place at which an answer differs from the stored one."""
    expected = json.loads((ANSWERS / f"{name}.json").read_text(encoding="utf-8"))
    return list(differences(expected, answer, name))


def differences(expected: Any, answer: Any, where: str) -> Iterator[str]:
    """Yield a line for each place at which two JSON values differ; a share that is absent is 0."""
    if None in (expected, answer) and isinstance(expected or answer, float):
        expected, answer = float(expected or 0.0), float(answer or 0.0)
    if isinstance(expected, dict) and isinstance(answer, dict):
        for key in sorted({*expected, *answer}):
            yield from differences(expected.get(key), answer.get(key), f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(answer, list) and len(expected) == len(answer):
        for place, pair in enumerate(zip(expected, answer, strict=True)):
            yield from differences(*pair, f"{where}[{place}]")
    elif isinstance(expected, float) and isinstance(answer, float | int):
        if not math.isclose(expected, answer, rel_tol=CLOSE_FRAC, abs_tol=1e-9):
            yield f"{where}: {expected} -> {answer}"
    elif isinstance(expected, str) and isinstance(answer, str):
        if not is_text_close(expected, answer):
            yield f"{where}: {expected[:80]} -> {answer[:80]}"
    elif expected != answer:
        yield f"{where}: {str(expected)[:80]} -> {str(answer)[:80]}"


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def is_text_close(expected: str, answer: str) -> bool:
    """Return whether two texts agree but for blanks and one in the last digit of a number.

    >>> is_text_close("1.25 s  of 3", "1.26 s of 3"), is_text_close("1.25 s", "1.27 s")
    (True, False)
    """
    if expected == answer:
        return True
    words = [" ".join(_NUMBER.sub("0", text).split()) for text in (expected, answer)]
    numbers = [_NUMBER.findall(text) for text in (expected, answer)]
    return words[0] == words[1] and all(map(_is_close, *numbers))


def _is_close(expected: str, answer: str) -> bool:
    digits = len(expected.partition(".")[2])
    apart = abs(float(expected.replace(",", "")) - float(answer.replace(",", "")))
    return apart <= 1.001 * 10.0**-digits


if __name__ == "__main__":
    sys.exit(main())
