"""On a narrow screen the step stays and what it rests on goes; without colour where it is not
wanted."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.forecast.rates import RemainingRun
from forerun.calib.memory.peak import Verdict
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.views.answer_tables import BestLayout, layouts_table, plans_table, tables_of
from forerun.launch.views.table import ReportTable, console, show_table

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"

TABLE = ReportTable(
    key="layouts",
    title="Layouts",
    columns=("layout", "step", "90 %", "rests on"),
    rows=(
        ("TP8 PP4 DP2 ZeRO1 mbs2 full", "10.52 ms", "9.1 ms to 12 ms", "60 % extrapolated, 4 %"),
    ),
    spare=("rests on", "90 %"),
)


def printed(width: int) -> str:
    return drawn(TABLE, width)


def drawn(table: ReportTable, width: int) -> str:
    out = io.StringIO()
    show_table(table, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize(
    ("width", "seen"), [(120, ["9.1 ms to 12 ms", "60 %"]), (75, ["9.1 ms to 12 ms"]), (45, [])]
)
def test_columns_go_in_their_order(width: int, seen: list[str]) -> None:
    text = printed(width)
    assert "TP8 PP4 DP2 ZeRO1 mbs2 full" in text and "10.52 ms" in text
    assert [cell for cell in ("9.1 ms to 12 ms", "60 %") if cell in text] == seen
    assert "…" not in text


@pytest.fixture(scope="module")
def answer() -> Answer:
    request = json.loads((GOLDEN / "request.json").read_text())
    return analyse(build_table(read_run(GOLDEN)), Request.from_json(request))


@pytest.fixture(scope="module")
def tables(answer: Answer) -> list[ReportTable]:
    """Tables of a run on GPUs with a price, so that every column is there."""
    running = replace(
        answer.known.plan.running,
        config=replace(answer.known.plan.running.config, device="NVIDIA H100"),
    )
    plan = replace(answer.known.plan, running=running)
    remaining_run = RemainingRun(
        config=running.config,
        step_time_s=running.step_time_s,
        remaining_s=1e7,
        now_unix_s=1.7e9,
        price_per_gpu_hour=2.0,
    )
    best = [
        BestLayout(
            device=("NVIDIA H100", "NVIDIA B200")[place % 2],
            num_ranks=8 << place,
            candidate=one,
            price_per_gpu_hour=2.0,
        )
        for place, one in enumerate(plan.candidates[:6])
    ]
    return [*tables_of(answer), layouts_table(plan, remaining_run=remaining_run), plans_table(best)]


@pytest.mark.parametrize("width", [60, 80])
def test_the_step_of_every_row_is_there_in_full_and_no_line_is_wider(
    tables: list[ReportTable], width: int
) -> None:
    for table in tables:
        text = drawn(table, width)
        assert max(map(cell_len, text.splitlines())) <= width, table.key
        assert "…" not in text, table.key
        if "step" in table.columns:
            steps = [row[table.columns.index("step")] for row in table.rows]
            lines = "\n".join(text.splitlines())
            assert all(lines.count(step) >= steps.count(step) for step in steps), table.key


def test_eighty_columns_say_which_layout_does_not_fit(answer: Answer) -> None:
    assert "fits" not in layouts_table(answer.known.plan).fit_to_width(60).columns
    first, *others = answer.known.plan.candidates
    too_large = replace(first, verdict=Verdict.DOES_NOT_FIT)
    table = layouts_table(replace(answer.known.plan, candidates=(too_large, *others)))
    for width in (60, 80):
        assert {"step", "fits"} <= set(table.fit_to_width(width).columns)
        assert "does not fit" in drawn(table, width)


def test_wide_screens_hold_every_column(tables: list[ReportTable]) -> None:
    for table in tables:
        assert table.fit_to_width(200) == table, table.key


cells = st.text("TP8mbs ZeRO.42,", min_size=1, max_size=40).map(lambda text: text.strip() or "x")


@given(
    rows=st.lists(st.tuples(*[cells] * 4), min_size=1, max_size=5),
    step=st.integers(1, 10**6),
    width=st.sampled_from([60, 80]),
)
def test_a_step_is_never_cut_whatever_stands_beside_it(
    rows: list[tuple[str, ...]], step: int, width: int
) -> None:
    steps = [f"{step + place}.5 ms" for place in range(len(rows))]
    table = ReportTable(
        key="any",
        title="Any",
        columns=("layout", "step", "90 %", "memory", "rests on"),
        rows=tuple((one[0], took, *one[1:]) for one, took in zip(rows, steps, strict=True)),
    ).with_spare_columns("rests on", late=("memory", "90 %"))
    text = drawn(table, width)
    assert all(took in text for took in steps)
    assert max(map(cell_len, text.splitlines())) <= width


def test_no_code_is_written_where_it_is_not_wanted(
    tables: list[ReportTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal, wish in ((False, {"FORCE_COLOR": "1"}), (True, {"NO_COLOR": "1"})):
        out = Terminal() if is_terminal else io.StringIO()
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm-256color")
            for name, value in wish.items():
                patch.setenv(name, value)
            patch.setattr("sys.stdout", out)
            show_table(tables[0], console())
        assert "step" in out.getvalue() and "\x1b" not in out.getvalue(), wish


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True
