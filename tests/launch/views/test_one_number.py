"""One run, one number: every surface says the same of a layout against the running one."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from companion_settings import companion_settings

import forerun
from forerun.calib.workload.run_options import WandbMode
from forerun.hooks.process.settings import CompanionSettings
from forerun.launch.cli import ExitCode, main
from forerun.launch.companion.companion_loop import CompanionLoop
from forerun.launch.sinks.sink import Sink

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
ARGV = (
    *("train.py", "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "16"),
    *("--train-iters", "20"),
)
WINDOW_END, LAST, NUM_STEPS = 11, 16, 20
BEGIN_UNIX_S, STEP_S = 1_795_000_000.0, 0.14
NUM_ROWS = 10
"""A page of the plan."""
TIMES = slice(4, 6)
"""Columns of a choice on the page with its step and interval, after the chosen settings."""


class Gain(NamedTuple):
    """A layout's step, and its share of the running one's that it takes more, with 90 %."""

    step_s: float
    frac: float
    low_frac: float
    high_frac: float

    @property
    def short(self) -> str:
        """As a column of text has it, from the numbers alone."""
        unsure = self.low_frac < 0 < self.high_frac
        return "cannot tell" if unsure else f"{100 * self.frac:+.1f} %"

    @property
    def ends(self) -> tuple[float, float]:
        """Its interval as a sentence has it: whole per cent, less or more."""
        low, high = sorted(abs(round(100 * one)) for one in (self.low_frac, self.high_frac))
        return low, high


class Tables(Sink):
    """Keeps what a sink gets."""

    def __init__(self) -> None:
        super().__init__("kept")
        self.taken: dict[str, Sequence[Mapping[str, Any]]] = {}

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self.taken |= tables


def near(value: Any) -> Any:
    """As it is but for the last digits of a sum."""
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def trained(settings: CompanionSettings, sink: Sink | None = None) -> str:
    """The recorded run through its companion; its log."""
    with contextlib.redirect_stdout(io.StringIO()) as log:
        loop = CompanionLoop(settings, open_sink=(lambda _: sink) if sink else None)
        for step in range(LAST):
            now = BEGIN_UNIX_S + STEP_S * (step + 1)
            is_after = step >= WINDOW_END
            event = {
                "event": "step", "step": step, "time_s": STEP_S + 0.001 * (step % 3),
                "is_hooked": False, "flags": [], "window": None if is_after else 0,
                "is_after_window": is_after, "unix_s": now,
            }  # fmt: skip
            loop.handle(event, now)
            if step == WINDOW_END:
                closed = {"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}
                loop.handle(closed, now)
                loop.poll(now + STEP_S)
        loop.finish(BEGIN_UNIX_S + STEP_S * (LAST + 1))
    return log.getvalue()


def output_of(*words: object) -> str:
    """Return the output of a verb."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*map(str, words)]) == ExitCode.ANSWER
    return out.getvalue()


class Page(HTMLParser):
    """The data of the choices on a page, and its cells by rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.data, self.rows = "", [list[str]()]
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        is_data = tag == "script" and dict(attrs).get("id") == "what-if-data"
        self._tag = "data" if is_data else tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._tag = "" if tag in ("td", "th", "script") else self._tag

    def handle_data(self, data: str) -> None:
        if self._tag == "data":
            self.data += data
        elif self._tag and self.rows[-1]:
            self.rows[-1][-1] += data


@dataclass(kw_only=True)
class Surfaces:
    """One finished run, and the plan of it that all are held against."""

    home: Path
    log: str
    taken: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """``forerun plan --json``."""
        return json.loads(output_of("plan", self.home, "--json", "--top", NUM_ROWS))

    @cached_property
    def gains(self) -> dict[str, Gain]:
        """By the names of the rows, the running one first."""
        return gains_of([self.plan["own"], *self.plan["candidates"]])

    @cached_property
    def run(self) -> Any:
        """As Python opens it."""
        return forerun.load(self.home)

    @cached_property
    def report(self) -> dict[str, Any]:
        """``forerun report --json``."""
        return json.loads(output_of("report", self.home, "--json"))

    @property
    def row(self) -> tuple[str, Gain]:
        """Row 1: the fastest other layout."""
        label = self.plan["candidates"][0]["label"]
        return label, self.gains[label]

    @property
    def advised(self) -> tuple[str, Gain]:
        """The fastest that the run can be asked for."""
        return self.plan["best"], self.gains[self.plan["best"]]

    def file(self, name: str) -> dict[str, Any]:
        """An answer that the run has written."""
        return json.loads((self.home / name).read_text())


def gains_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Gain]:
    names = ("step_time_s", "time_frac", "time_frac_low", "time_frac_high")
    return {row["label"]: Gain(*(row[name] for name in names)) for row in rows}


def rows_of(text: str) -> dict[str, list[str]]:
    """Rows of a table of layouts in a terminal or in Markdown, by the label of the layout."""
    split = [re.split(r"\s{2,}|\s*\|\s*", line.strip(" |")) for line in text.splitlines()]
    begin = next(place for place, cells in enumerate(split) if cells[:2] == ["#", "layout"])
    # Behind the head there is a rule.
    rows = itertools.takewhile(lambda cells: cells[0].isdecimal(), split[begin + 2 :])
    return {cells[1].removesuffix(" (running)"): cells for cells in rows}


def interval_ends(text: str) -> tuple[float, float]:
    """The interval of a sentence that says how much less or more."""
    match = re.search(r"(\d+)(?: % \w+)? to (\d+)(?: % \w+ per step)?\)", text)
    assert match is not None, text
    low, high = sorted(map(float, match.groups()))
    return low, high


RAMP = {"rampup_batch_size": [16, 16, 160_000], "full_batch_size": 32}


def ramped(records: Path) -> None:
    """The batch of the run is to double later."""
    for path in records.rglob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["type"] == "run":
                line["config"]["cadence"] |= RAMP
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture(scope="module", params=["plain", "ramped"])
def surfaces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Surfaces:
    home = tmp_path_factory.mktemp("one_number") / "run"
    shutil.copytree(GOLDEN / "records", home / "records")
    if request.param == "ramped":
        ramped(home / "records")
    settings = companion_settings(home, num_steps=NUM_STEPS, wandb=WandbMode.OFF, host_argv=ARGV)
    sink = Tables()
    log = trained(replace(settings, started_unix_s=BEGIN_UNIX_S), sink)
    return Surfaces(home=home, log=log, taken=sink.taken)


def test_a_share_is_of_the_running_step(surfaces: Surfaces) -> None:
    running_gain = surfaces.gains[surfaces.plan["own"]["label"]]
    if (measured_s := surfaces.plan["measured_step_time_s"]) is not None:  # not at a size to come
        assert running_gain.step_s == pytest.approx(measured_s, rel=1e-3)
    assert running_gain.frac == running_gain.low_frac == running_gain.high_frac == 0.0
    for gain in surfaces.gains.values():
        assert gain.frac == near(gain.step_s / running_gain.step_s - 1)


NUMBERS = {
    "report --json": lambda views: views.report["plan"],
    "answer.json of the run": lambda found: found.file("answer.json")["plan"],
    "plan in Python": lambda found: found.run.plan().to_json(),
    "report in Python": lambda found: found.run.report().to_json()["plan"],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_programs_read_the_same_plan(name: str, surfaces: Surfaces) -> None:
    value = NUMBERS[name](surfaces)
    rows = gains_of([value["own"], *value["candidates"][:NUM_ROWS]])
    assert list(rows) == list(surfaces.gains)
    for label, gain in rows.items():
        assert gain == near(surfaces.gains[label]), label
    assert value["best"] == surfaces.plan["best"]


def test_predict_and_explain_say_the_same_of_a_row(surfaces: Surfaces) -> None:
    for number, row in enumerate(surfaces.plan["candidates"], 1):
        gain = surfaces.gains[row["label"]]
        predicted = json.loads(output_of("predict", surfaces.home, "--json", *row["options"]))
        assert gains_of([predicted]) == {row["label"]: near(gain)}
        explained = json.loads(output_of("explain", surfaces.home, number, "running", "--json"))
        assert explained["difference"]["time_frac"] == near(gain.frac)
        assert explained["layout"]["step_time_s"] == near(gain.step_s)


def test_sinks_get_the_rows_as_numbers(surfaces: Surfaces) -> None:
    rows = surfaces.taken["layouts"]
    assert len(rows) == NUM_ROWS + 1
    for row in rows:
        gain = surfaces.gains[row["layout"].removesuffix(" (running)")]
        assert row["step (s)"] == near(gain.step_s)
        assert row["against running (frac)"] == near(gain.frac)


TEXTS = {
    "report": lambda found: output_of("report", found.home, "--full"),
    "plan": lambda found: output_of("plan", found.home),
}


@pytest.mark.parametrize("name", TEXTS)
def test_people_read_the_same_rows(name: str, surfaces: Surfaces) -> None:
    rows = rows_of(TEXTS[name](surfaces))
    assert list(rows) == list(surfaces.gains)
    for label, gain in [*surfaces.gains.items()][1:]:
        assert gain.short in rows[label], label


def test_the_page_says_the_same_in_its_table_and_in_its_choices(surfaces: Surfaces) -> None:
    page = Page((surfaces.home / "report.html").read_text())
    table = {cells[1]: cells for cells in page.rows if len(cells) > 4 and cells[0].isdecimal()}
    data = json.loads(page.data)
    choices = {words_of(cells): cells for cells in data["rows"]}
    for row in surfaces.plan["candidates"]:
        words = frozenset([str(row["num_ranks"]), *row["label"].split()])
        gain, shown, chosen = surfaces.gains[row["label"]], table[row["label"]], choices[words]
        assert gain.short in shown and gain.short in chosen
        assert {*chosen[TIMES]} <= {*shown}, "one step, one interval"
    (running,) = [cells for name, cells in table.items() if name.endswith("(running)")]
    assert {*data["rows"][data["running"]][TIMES]} <= {*running}


def words_of(choice: Sequence[str]) -> frozenset[str]:
    """The words of a label, and the ranks, of what the menus choose."""
    ranks, layout, size, recompute = choice[: TIMES.start]
    return frozenset([ranks, *layout.split(), f"mbs{size}", recompute]) - {"none"}


def test_sentences_say_the_same_of_the_advised_layout(surfaces: Surfaces) -> None:
    label, gain = surfaces.advised
    lines = [line for line in surfaces.log.splitlines() if "faster here" in line]
    assert {interval_ends(line) for line in lines} == {gain.ends}
    sentences = [
        line for line in surfaces.report["decision"]["transcript"] if "faster here" in line
    ]
    assert sentences == [line for line in lines if "next time" in line], "the run has ended"
    decision = surfaces.file("decision.json")
    assert gains_of([decision["candidate"]])[label] == near(gain)
    (numbers,) = [one["numbers"] for one in decision["reasons"] if one["rule"] == "restart"]
    assert numbers["time_frac"] == near(gain.frac)
    assert surfaces.run.decision.to_json()["candidate"] == decision["candidate"]
    explained = surfaces.run.report().answer.known.explained[-1].to_json()
    assert explained["difference"]["time_frac"] == near(gain.frac)
    page = (surfaces.home / "report.html").read_text()
    chart = page.partition('id="figure-layouts"')[2].partition("</svg>")[0]
    assert interval_ends(chart) == gain.ends


def test_the_card_says_the_same_of_the_advised_layout(surfaces: Surfaces) -> None:
    _, gain = surfaces.advised
    text = " ".join((surfaces.home / "report.html").read_text().split())
    is_unsure = gain.short == "cannot tell"
    assert ("nothing is surely faster" in text) is is_unsure
    assert (f"{-100 * gain.frac:.1f} % less per step available" in text) is not is_unsure


def test_status_repeats_the_reason_of_the_decision(surfaces: Surfaces) -> None:
    result = json.loads(output_of("status", surfaces.home, "--json"))
    run_status = result["runs"][0] if "runs" in result else result
    reasons = [one["text"] for one in surfaces.report["decision"]["reasons"]]
    assert run_status["reason"] in reasons


def test_wandb_and_tensorboard_are_read_back_with_the_rows(
    surfaces: Surfaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_MODE", "offline")
    home = tmp_path / "run"
    shutil.copytree(surfaces.home / "records", home / "records")
    settings = companion_settings(home, num_steps=NUM_STEPS, host_argv=ARGV)
    trained(replace(settings, started_unix_s=BEGIN_UNIX_S))
    (path,) = (home / "wandb").rglob("layouts_*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    events = board.EventAccumulator(str(home / "tensorboard" / "golden-run")).Reload()
    (event,) = events.Tensors("calib/layouts")
    shown = rows_of(event.tensor_proto.string_val[0].decode())
    for row in rows:
        label = row["layout"].removesuffix(" (running)")
        gain = surfaces.gains[label]
        assert row["against running (frac)"] == near(gain.frac)
        assert row["step (s)"] == near(gain.step_s)
        place = table["columns"].index("against running (frac)")
        assert float(shown[label][place]) == near(gain.frac)


def test_each_share_names_its_step(surfaces: Surfaces) -> None:
    answer = surfaces.run.report().answer
    steps = {
        "modelled": answer.known.step.time_s,
        "simulated": answer.known.running_estimate.time_s,
        "measured": answer.measured_step_s,
    }
    seen = set()
    for key in ("step_parts", "work", "waiting"):
        for row in surfaces.taken[key]:
            (name,) = [name for name in row if name.endswith("(frac)")]
            match = re.fullmatch(r"of the (\w+) step \(frac\)", name)
            assert match is not None, f"{key}: {name} does not say of which step"
            spent = ("time (s)", "time per step (s)", "for the transfer (s)", "for later ranks (s)")
            time_s = sum(row.get(column, 0.0) for column in spent)
            assert time_s == near(row[name] * steps[match[1]])
            seen.add(match[1])
    assert seen == steps.keys()
    parts = surfaces.taken["step_parts"]
    assert sum(row["of the modelled step (frac)"] for row in parts) == pytest.approx(1.0, abs=1e-3)
