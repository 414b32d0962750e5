"""Scaling for people: Llama 3.1 70B on H100, one published step of it known, and B200 beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from forerun.benchmarks.published.readers import steps_of
from forerun.calib.advice.planning import compare
from forerun.calib.advice.scaling import Scaling, compute_scaling
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.step_tables import table_steps
from forerun.calib.workload.config import Batch
from forerun.launch.views.answer_tables import (
    BestLayout,
    bars,
    knee_line,
    plans_table,
)
from forerun.launch.views.table import show_table

PUBLISHED = Path(__file__).parents[3] / "recipes" / "published"
COUNTS = (64, 512, 2048, 4096, 8192)
B200 = "NVIDIA B200"


@pytest.fixture(scope="module")
def curves() -> list[Scaling]:
    rows = steps_of(PUBLISHED, "steps_dgxc_scaling").rows
    row = min((r for r in rows if "llama3-70b BF16" in r.group), key=lambda r: r.num_ranks)
    other = replace(row, config=replace(row.config, device=B200), machine=B200)
    results = []
    for one, known in ((row, [KnownStep.of(row)]), (other, [])):
        par, steps = one.config.parallelism, table_steps(one, known)
        configs = [
            replace(
                one.config,
                parallelism=replace(par, dp=par.dp * num // par.num_ranks),
                batch=Batch(micro_batch_size=1, global_batch_size=1024),
            )
            for num in COUNTS
        ]
        results.append(compute_scaling(compare(configs[0], configs, steps), steps))
    return results


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("width", [80, 200])
def test_table_and_bars_fit_the_screen(curves: list[Scaling], num_devices: int, width: int) -> None:
    rows = [
        BestLayout(
            device=one.device,
            num_ranks=point.num_ranks,
            candidate=point.candidate,
            price_per_gpu_hour=None,
            point=point,
        )
        for one in curves[:num_devices]
        for point in one.points
    ]
    out = Console(width=width)
    with out.capture() as caught:
        show_table(plans_table(rows), out)
    table = caught.get()
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    for name in ("GPUs", "best layout", "step", "tokens/s"):
        assert name in table.partition("─")[0]
    assert (B200 in table) is (num_devices == 2)
    assert ("too far to trust" in table) is any(not row.point.is_trusted for row in rows)
    assert max(map(len, bars(curves[:num_devices]))) <= 80


def test_bars_are_as_long_as_the_efficiency(curves: list[Scaling]) -> None:
    lines = list(bars(curves[:1]))[1:]
    lengths = [line.count("█") for line in lines]
    assert lengths == sorted(lengths, reverse=True)
    for line, point in zip(lines, curves[0].points, strict=True):
        assert line.count("█") == round(32 * point.efficiency_frac)
        assert f"{point.efficiency_frac * 100:.0f} %" in line


def test_the_knee_is_told_with_what_it_may_be(curves: list[Scaling]) -> None:
    scaling = curves[0]
    bent = replace(
        scaling,
        growths=tuple(
            replace(growth, past_knee_probability=chance)
            for growth, chance in zip(scaling.growths, (0.01, 0.2, 0.6, 0.7), strict=True)
        ),
    )
    assert knee_line(bent).startswith("knee at 2,048 GPUs (90 %: 512 to beyond 8,192)")
    sure = replace(
        scaling,
        growths=tuple(
            replace(growth, past_knee_probability=chance)
            for growth, chance in zip(scaling.growths, (0.01, 0.02, 0.96, 0.99), strict=True)
        ),
    )
    assert knee_line(sure).startswith("knee at 2,048 GPUs (with 90 % confidence)")
    straight = replace(
        scaling, growths=tuple(replace(g, past_knee_probability=0.0) for g in scaling.growths)
    )
    assert knee_line(straight).startswith("no knee up to 8,192 GPUs")


def test_the_curve_is_plain_json(curves: list[Scaling]) -> None:
    curve_json = json.loads(json.dumps(curves[0].to_json()))
    assert [point["num_ranks"] for point in curve_json["points"]] == list(COUNTS)
    assert curve_json["points"][0]["efficiency_frac"] == 1.0
    for growth, point, after in zip(
        curve_json["growths"], curve_json["points"], curve_json["points"][1:], strict=False
    ):
        lost = point["efficiency_frac"] / after["efficiency_frac"] - 1
        assert sum(growth["parts_frac"].values()) == pytest.approx(lost)
