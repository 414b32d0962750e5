"""The table of choices on the page: what ``forerun predict`` answers, in a browser and without."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
import what_if_menus

import forerun
from forerun.calib.answers.what_if import MOST_ROWS, what_if
from forerun.calib.workload.config import RunConfig
from forerun.launch.views.answers import page_of as made
from forerun.launch.views.answers import render
from forerun.launch.views.what_if import NUM_MENUS

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
NUM_SETTINGS = 50
MOST_NBYTES = 200_000


class Parts(HTMLParser):
    """The data of the page, and the cells of the table that it lies beside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.data = ""
        self.rows: list[list[str]] = []
        self._is_data = self._is_table = self._is_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs).get("id")
        self._is_data = tag == "script" and named == "what-if-data"
        self._is_table = self._is_table or named == "what-if-rows"
        if self._is_table and tag == "tr":
            self.rows.append([])
        self._is_cell = self._is_table and tag == "td"

    def handle_endtag(self, tag: str) -> None:
        self._is_table = self._is_table and tag != "table"
        self._is_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self.data += data
        elif self._is_cell:
            self.rows[-1].append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # A copy: the fit is kept beside the samples.
    copied = shutil.copytree(GOLDEN, tmp_path_factory.mktemp("what_if") / "run")
    return forerun.load(copied)


@pytest.fixture(scope="module")
def html(run: Any) -> str:
    return run.report().html


@pytest.fixture(scope="module")
def parts(html: str) -> Parts:
    return Parts(html)


def test_the_table_is_there_without_the_script(parts: Parts) -> None:
    data = json.loads(parts.data)
    shown = [row for row in parts.rows if row]
    assert [row[:-1] for row in data["rows"]] == shown
    assert 20 < len(shown) <= MOST_ROWS


def test_every_choice_is_there_once_and_the_running_one_is_known(parts: Parts, run: Any) -> None:
    data = json.loads(parts.data)
    chosen = [tuple(row[:NUM_MENUS]) for row in data["rows"]]
    assert len(chosen) == len(set(chosen))
    assert data["rows"][data["running"]][-1] == ""
    counts = [int(row[0]) for row in chosen]
    assert counts == sorted(counts)


@pytest.mark.slow
def test_rows_say_what_predict_answers(parts: Parts, run: Any) -> None:
    data = json.loads(parts.data)
    sampled_rows = what_if_menus.spread(data["rows"], NUM_SETTINGS)
    for *cells, words in sampled_rows:
        assert words is not None
        results = what_if_menus.predicted_cells(run, f"{data['command']} {words}")
        assert results == cells[NUM_MENUS:]


def test_nearest_choices_come_first_and_no_more_than_fit_on_a_page(run: Any) -> None:
    answer, steps = run.report().answer, run.machine().steps
    few = replace(answer.known.plan, candidates=())
    rows = what_if(few, steps)
    assert rows[0].config == answer.known.plan.running.config
    away = [doublings(row.config, rows[0].config) for row in rows]
    assert away == sorted(away)
    many = what_if(answer.known.plan, steps, gpus=(4, 8, 16, 32, 64))
    assert len(rows) < len(many) <= MOST_ROWS
    assert [row.label for row in many] == [
        row.label for row in what_if(answer.known.plan, steps, gpus=(4, 8, 16, 32, 64))
    ]
    page = render(
        made(
            run.directory,
            replace(answer, modelled=replace(answer.known, what_if=many)),
        )
    )
    assert len(page.encode()) * MOST_ROWS < MOST_NBYTES * len(many)


def doublings(config: RunConfig, other: RunConfig) -> float:
    pairs = [
        (config.parallelism.num_ranks, other.parallelism.num_ranks),
        (config.parallelism.tp, other.parallelism.tp),
        (config.parallelism.pp, other.parallelism.pp),
        (config.batch.micro_batch_size, other.batch.micro_batch_size),
    ]
    return sum(abs(math.log2(a / b)) for a, b in pairs) + (config.recompute != other.recompute)


def test_a_loop_of_ones_own_is_asked_for_no_layout_that_it_would_have_to_build(run: Any) -> None:
    plan, steps = run.report().answer.known.plan, run.machine().steps
    user_config = replace(plan.running.config, framework="transformers 4.57")
    candidates = what_if(
        replace(plan, running=replace(plan.running, config=user_config), candidates=()),
        steps,
        gpus=(4,),
    )
    assert {(row.config.parallelism.tp, row.config.parallelism.pp) for row in candidates} == {
        (1, 1)
    }
    assert {row.config.parallelism.num_ranks for row in candidates} == {1, 2, 4}


needs_browser = pytest.mark.skipif(browser.find_chromium() is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def file(html: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


@needs_browser
def test_fifty_settings_show_what_predict_answers(file: Path, run: Any) -> None:
    with browser.open_page(file) as tab:
        number, wrong = what_if_menus.differences(tab, run, NUM_SETTINGS)
        assert not wrong and number == NUM_SETTINGS
        assert not tab.problems
        assert [url for url in tab.requested_urls if not url.startswith("data:")] == [file.as_uri()]
        shown = tab.value(what_if_menus.SHOWN)
    assert shown["is_folded"] and not shown["is_hidden"]


@needs_browser
def test_menus_go_by_keys(file: Path) -> None:
    with browser.open_page(file) as tab:
        before = tab.value(what_if_menus.SHOWN)
        tab.value("document.querySelector('#what-if-panel select').focus()")
        tab.press("Tab", "Tab", "ArrowDown")
        after = tab.value(what_if_menus.SHOWN)
        places = "[...document.querySelectorAll('select')].indexOf(document.activeElement)"
        assert tab.value(places) == 2
    assert after["menus"][:2] == before["menus"][:2]
    assert after["menus"][2] != before["menus"][2] and after["cells"] != before["cells"]


@needs_browser
def test_without_scripts_the_table_is_open_and_no_menu_is_seen(file: Path) -> None:
    with browser.open_page(file, has_script=False) as tab:
        panel = "document.getElementById('what-if-panel').offsetHeight"
        table = "document.querySelector('#what-if-rows table').offsetHeight"
        assert tab.value(panel) == 0 and tab.value(table) > 100


@needs_browser
@pytest.mark.parametrize("width", browser.WIDTHS)
def test_nothing_is_wider_than_the_screen(file: Path, width: int) -> None:
    with browser.open_page(file, width) as tab:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", **metrics)
        assert tab.value("document.documentElement.scrollWidth") <= width
