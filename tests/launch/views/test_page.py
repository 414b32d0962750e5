"""``report.html`` as a reader's program sees it: one script, no network, every picture said."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.request import Request
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.views.answer_tables import NUM_LAYOUTS
from forerun.launch.views.answers import Page, page_of, render
from forerun.launch.views.charts import layouts_chart

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
MOST_NBYTES = 200_000
_ALONE = ("meta", "link", "rect", "path", "circle", "br", "img")


class Outline(HTMLParser):
    """Tags with their attributes, and that each that opens is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in _ALONE:
            assert self.open.pop() == tag

    def all(self, name: str) -> Iterator[dict[str, str | None]]:
        return (attributes for tag, attributes in self.tags if tag == name)


@pytest.fixture(scope="module")
def page() -> Page:
    table = build_table(read_run(GOLDEN))
    answer = analyse(table, Request(now_unix_s=1e9, last_step=11))
    page = page_of(GOLDEN, answer)
    made = [
        Forecast(
            now_unix_s=1e9 + at,
            steps_done=at,
            steps_left=100 - at,
            elapsed_s=float(at),
            finish_p50_unix_s=1e9 + 100,
            finish_p95_unix_s=1e9 + 120,
            remaining_low_s=90.0 - at,
            remaining_s=100.0 - at,
            remaining_high_s=120.0 - at,
        )
        for at in (10, 30, 60)
    ]
    return replace(page, made=made, end_unix_s=1e9 + 103)


@pytest.fixture(scope="module")
def outline(page: Page) -> Outline:
    return Outline(render(page))


def test_the_page_is_small_has_one_script_and_needs_no_network(page: Page) -> None:
    text = render(page)
    assert len(text.encode()) < MOST_NBYTES
    outline = Outline(text)
    assert not outline.open
    data, script = outline.all("script")
    assert data == {"type": "application/json", "id": "what-if-data"} and not script
    assert not [name for _, attributes in outline.tags for name in attributes if name[:2] == "on"]
    links = [
        value or ""
        for _, attributes in outline.tags
        for name, value in attributes.items()
        if name in ("href", "src", "srcset", "action") or "url(" in (value or "")
    ]
    assert links == ["data:,"]
    assert "@import" not in text and "url(" not in text


def test_the_policy_of_the_page_allows_its_own_script_alone(page: Page) -> None:
    """By it a browser refuses every request of the script, text as code, and other scripts."""
    text = render(page)
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (
        attributes["content"] or ""
        for attributes in Outline(text).all("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "script-src": f"'sha256-{digest}'",
    }


def test_a_name_of_a_directory_cannot_end_the_data(page: Page) -> None:
    text = render(page, directory="</script><b>")
    assert "</script><b>" not in text and len(list(Outline(text).all("script"))) == 2


def test_every_picture_has_a_title_and_a_text_of_its_own(outline: Outline) -> None:
    names = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(names) == len(set(names))
    drawings = list(outline.all("svg"))
    assert len(drawings) == 10
    for drawing in drawings:
        assert drawing["role"] == "img"
        label_ids = (drawing["aria-labelledby"] or "").split()
        assert len(label_ids) == 2 and set(label_ids) <= set(names)


def test_headings_go_down_by_one_and_regions_are_named(outline: Outline) -> None:
    levels = [int(tag[1]) for tag, _ in outline.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    names = {attributes.get("id") for _, attributes in outline.tags}
    assert all(section["aria-labelledby"] in names for section in outline.all("section"))
    assert all(region.get("aria-label") for region in outline.all("div") if "role" in region)


def test_what_can_be_scrolled_can_be_reached_by_keys(outline: Outline) -> None:
    scrolled = [one for one in outline.all("div") if one.get("class") == "scroll"]
    assert scrolled and all(one.get("tabindex") == "0" for one in scrolled)


def test_a_layout_that_is_not_offered_looks_otherwise_without_its_colour(page: Page) -> None:
    plan = page.answer.known.plan
    barred = [row for row in plan.candidates[:NUM_LAYOUTS] if plan.obstacle(row)]
    drawing = layouts_chart(plan, plan.candidates[:NUM_LAYOUTS], 820)
    assert drawing is not None and barred
    sign_of_legend = 1
    assert drawing.body.count('class="grey-ring"') == len(barred) + sign_of_legend
    only = layouts_chart(plan, barred, 820)
    assert only is not None and "other layouts" not in only.body
    assert "memory that it needs, MiB" in drawing.body


def test_markup_stays_text(page: Page) -> None:
    text = render(replace(page, notes=("<b>&</b>",)), directory="<i>")
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in text and "<i>" not in text
