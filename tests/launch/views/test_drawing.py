"""Drawings: well formed, inside their frames, and to be told apart by everyone."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.forecast.forecast_record import Forecast
from forerun.launch.store.run_log import LoggedStep
from forerun.launch.views._canvas import (
    DARK,
    HUES,
    LIGHT,
    Canvas,
    Drawing,
    Scale,
    moment_ticks,
    round_ticks,
)
from forerun.launch.views.charts import (
    Bar,
    bars_chart,
    finish_chart,
    label_places,
    steps_chart,
)

SVG = "{http://www.w3.org/2000/svg}"
finite = st.floats(-1e12, 1e12, allow_nan=False)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(colours: dict[str, str]) -> None:
    for back in ("page", "panel"):
        assert contrast(colours["ink"], colours[back]) >= 7.0
        assert contrast(colours["faint"], colours[back]) >= 4.5
    for hue in HUES:
        assert contrast(colours[hue], colours["page"]) >= 3.0


# Viénot, Brettel and Mollon (1999): linear RGB as deuteranopes and protanopes see it.
BLIND = {
    "protanope": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deuteranope": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("matrix", BLIND.values(), ids=BLIND)
def test_what_stands_side_by_side_is_told_apart_without_red_or_green(
    matrix: tuple[tuple[float, ...], ...], colours: dict[str, str]
) -> None:
    def seen(colour: str) -> tuple[float, ...]:
        parts = [int(colour[p : p + 2], 16) / 255 for p in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        mixed = [sum(w * v for w, v in zip(row, linear, strict=True)) for row in matrix]
        return tuple(max(0.0, value) ** (1 / 2.2) * 255 for value in mixed)

    pairs = [("blue", "orange"), ("blue", "grey"), ("green", "orange")]
    for one, other in pairs:
        apart = sum(
            (a - b) ** 2 for a, b in zip(seen(colours[one]), seen(colours[other]), strict=True)
        )
        assert apart**0.5 > 35, (one, other)


@given(finite, finite, st.integers(2, 12))
def test_round_ticks_lie_inside_and_are_evenly_spaced(low: float, high: float, most: int) -> None:
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        return
    ticks = [tick.value for tick in round_ticks(low, high, most)]
    tolerance = 1e-6 * (high - low)
    assert len(ticks) <= most + 1
    assert all(low - tolerance <= tick <= high + tolerance for tick in ticks)
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-6) for gap in gaps)


@given(st.floats(0, 4e9), st.floats(1, 1e9), st.integers(2, 8))
def test_moments_lie_inside_and_have_texts_that_differ(low: float, span: float, most: int) -> None:
    ticks = moment_ticks(low, low + span, most)
    assert len(ticks) <= most
    assert all(low - 1e-6 <= tick.value <= low + span + 1e-6 for tick in ticks)
    assert len({tick.text for tick in ticks}) == len(ticks)


@given(finite, finite, st.floats(0, 1))
def test_a_scale_is_linear(begin: float, end: float, share: float) -> None:
    value = Scale(low=2.0, high=4.0, begin=begin, end=end)(2.0 + 2.0 * share)
    assert value == pytest.approx(begin + share * (end - begin), rel=1e-9, abs=1e-3)


@given(
    st.lists(st.tuples(st.text(max_size=60), st.floats(0, 1e6)), min_size=1, max_size=40),
    st.sampled_from([358, 820]),
)
def test_bars_stay_in_their_frame(rows: list[tuple[str, float]], width: int) -> None:
    texts = [("".join(c for c in name if c.isprintable()), value) for name, value in rows]
    bars = [Bar(name=name, end=value, text="x") for name, value in texts]
    drawing = bars_chart("t", bars, [], width, text="")
    if max(value for _, value in rows) <= 0:
        assert drawing is None
        return
    assert drawing is not None
    root = ElementTree.fromstring(drawing.alone())
    results = [r for r in root.iter(f"{SVG}rect") if "%" not in r.get("width", "")]
    assert len(results) == len(rows)
    for bar in results:
        right = float(bar.get("x", "0")) + float(bar.get("width", "0"))
        assert 0 <= float(bar.get("x", "0")) <= right <= width


def test_markup_in_names_stays_text() -> None:
    canvas = Canvas(100, 40)
    canvas.text((0, 0), "<script>&", shown='"<b>')
    root = ElementTree.fromstring(canvas.finished("<t>", "<d>").alone())
    assert [one.text for one in root.iter(f"{SVG}text")] == ["<script>&"]
    assert not list(root.iter(f"{SVG}script"))


def test_a_stall_does_not_press_the_other_steps_to_a_line() -> None:
    points = [LoggedStep(iteration=n, time_s=1.0 + 0.01 * (n % 3)) for n in range(100)]
    points[40] = LoggedStep(iteration=40, time_s=1000.0)
    drawing = steps_chart(points, 820)
    assert drawing is not None and "1,000" not in drawing.body
    assert steps_chart([], 820) is None


@given(
    st.lists(st.tuples(st.floats(60, 780), st.floats(60, 300)), min_size=1, max_size=8, unique=True)
)
def test_labels_far_apart_stand_beside_their_points(points: list[tuple[float, float]]) -> None:
    names = [str(place) for place in range(len(points))]
    places = label_places(points, names, 820)
    for (x, y), (label_x, base) in zip(points, places, strict=True):
        assert abs(label_x - x) < 40 and abs(base - y) <= 50


def test_labels_do_not_cover_one_another() -> None:
    points = [(100.0, 100.0), (101.0, 101.0), (100.0, 104.0), (103.0, 99.0)]
    places = label_places(points, ["1", "2", "3", "4"], 820)
    for one, other in itertools.combinations(places, 2):
        assert abs(one[0] - other[0]) >= 7 or abs(one[1] - other[1]) >= 13


def texts(drawing: Drawing) -> list[tuple[str, float, float]]:
    root = ElementTree.fromstring(drawing.alone())
    generator = root.iter(f"{SVG}text")
    return [
        (one.text or "", float(one.get("x", "0")), float(one.get("y", "0"))) for one in generator
    ]


def test_rows_of_a_legend_push_down_what_is_below() -> None:
    bars = [Bar(name="linear_qkv backward", end=1.0, text="x")]
    names = [("operators", "blue"), ("transfers, before overlap", "green")]
    tops = {}
    for width in (820, 358):
        drawing = bars_chart("t", bars, names, width, text="")
        assert drawing is not None
        rows = {y for text, _, y in texts(drawing) if text in dict(names)}
        (tops[width],) = (y for text, _, y in texts(drawing) if text.startswith("linear"))
        assert tops[width] >= max(rows) + 20 and drawing.height >= tops[width]
    assert tops[358] > tops[820]


def past_forecast(iteration: int, finish_unix_s: float) -> Forecast:
    now = 1e9 - 60.0
    return Forecast(
        now_unix_s=now,
        steps_done=iteration,
        steps_left=1000 - iteration,
        elapsed_s=float(iteration),
        finish_p50_unix_s=finish_unix_s,
        finish_p95_unix_s=finish_unix_s + 5.0,
        remaining_low_s=finish_unix_s - 5.0 - now,
        remaining_s=finish_unix_s - now,
        remaining_high_s=finish_unix_s + 5.0 - now,
    )


def test_titles_of_axes_stand_below_the_legend() -> None:
    drawing = finish_chart([past_forecast(10, 1e9), past_forecast(20, 1e9)], 1e9, 358)
    assert drawing is not None
    at = {text: y for text, _, y in texts(drawing)}
    assert at["end of the run, UTC"] >= at["actual end"] + 14


def test_forecasts_are_counted_as_made_and_short_runs_end_to_the_second() -> None:
    drawing = finish_chart([past_forecast(n, 1e9) for n in range(1, 1000)], 1e9 + 1, 820)
    assert drawing is not None and drawing.text.startswith("The newest of 999 forecasts")
    assert "says 01:46:40 UTC; the run ended 01:46:41 UTC" in drawing.text
    one = finish_chart([past_forecast(5, 1e9)], 1e9 + 1, 820)
    assert one is not None and one.text.startswith("The one forecast, after step 5, says")
    assert finish_chart([past_forecast(5, 1e9)], None, 820) is None  # a single point shows nothing
    assert steps_chart([LoggedStep(iteration=1, time_s=1.0)], 820) is None
    far = finish_chart([past_forecast(5, 1e9), past_forecast(6, 1e9 + 1e6)], None, 820)
    assert far is not None and far.text.endswith("says Thu 20 Sep 15:33 UTC")


def test_steps_are_counted_as_run_not_as_drawn() -> None:
    points = [LoggedStep(iteration=n, time_s=1.0) for n in range(1000)]
    drawing = steps_chart(points, 820)
    assert drawing is not None and drawing.text.startswith("1000 steps")


def test_a_name_leaves_the_interval_of_another_point_free() -> None:
    points, names = [(100.0, 100.0), (130.0, 140.0)], ["running", "1"]
    spreads = [(80.0, 120.0), (60.0, 200.0)]
    for (x, _), (label_x, base), name in zip(
        points, label_places(points, names, 820, spreads), names, strict=True
    ):
        for (at, _), (top, bottom) in zip(points, spreads, strict=True):
            is_horizontally_clear = label_x > at or label_x + 7.8 * len(name) < at
            assert is_horizontally_clear or base < top or base - 11 > bottom, (name, x)
