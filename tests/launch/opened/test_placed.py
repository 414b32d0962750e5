"""A run among published ones: its place, the nearest, and what differs; held against the tables'
own columns, with FLOP counted here."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from json_schema import check
from planted_runs import planted_run

from forerun.calib.advice.axes import changed
from forerun.calib.differences.norms import NearRow, bus_rates, near_rows
from forerun.calib.errors import ConfigError
from forerun.calib.importers.canonical_steps import canonical_frame
from forerun.calib.records.step_rows import StepRow
from forerun.calib.samples.columns import normalise
from forerun.calib.samples.table import SampleTable
from forerun.calib.steps.known_steps import KnownStep, same_layout
from forerun.calib.steps.step_tables import table_steps
from forerun.calib.workload.config import Recompute
from forerun.launch.cli import ExitCode, main
from forerun.launch.known.table_files import FOLDER, published_rows, read_frame
from forerun.launch.opened import placement as placed

SCHEMA = json.loads((Path(placed.__file__).parents[1] / "views/normal.schema.json").read_text())
ROWS = published_rows()
SEED = 11
GENERATIONS = ("gb300", "gb200", "b300", "b200", "gh200", "gh-96", "h100", "a100")
"""Longer names first."""
Out = pytest.CaptureFixture[str]


def cells_of(table: str) -> dict[str, dict[str, Any]]:
    """A table's own cells by row, as text of numbers and words; what is empty is left out."""
    frame = pd.read_csv(FOLDER / table).replace("", np.nan)
    return {r["row_id"]: r.dropna().to_dict() for _, r in frame.iterrows()}


CELLS = {table: cells_of(table) for table in sorted({row.table for row in ROWS})}


def cells(row: StepRow) -> dict[str, Any]:
    return CELLS[row.table][row.row_id]


def flop_per_token(c: dict[str, Any]) -> float:
    """Three passes of two FLOP over the weights that a token meets, and half of the scores."""
    hidden, heads, seq = c["hidden_size"], c["num_attention_heads"], c["seq_length"]
    layers, ahead = c["num_layers"], c.get("mtp_num_layers", 0)
    gate = 3 if c.get("swiglu") else 2
    wide = gate * hidden * c["ffn_hidden_size"]
    mlp = (layers + ahead) * wide
    if "num_experts" in c:
        met = c["moe_router_topk"] * c["moe_ffn_hidden_size"]
        met += c.get("moe_shared_expert_intermediate_size", 0)
        # Megatron's pattern, as "[0]*3+[1]*58": layers with experts are those of ones.
        ones = re.findall(r"\[1\]\*(\d+)", str(c.get("moe_layer_freq", "")))
        sparse = sum(map(int, ones)) or layers
        mlp = (sparse + ahead) * gate * hidden * met + (layers - sparse) * wide
    if c.get("multi_latent_attention"):
        width = heads * (c["qk_head_dim"] + c["qk_pos_emb_head_dim"])
        rank, values = c["kv_lora_rank"], heads * c["v_head_dim"]
        attention = c["q_lora_rank"] * (hidden + width) + values * hidden
        attention += rank * (hidden + heads * c["qk_head_dim"] + values)
        attention += hidden * c["qk_pos_emb_head_dim"] + seq * (width + values) / 2
    else:
        queries = heads * c["kv_channels"]
        keys = c.get("num_query_groups", heads) * c["kv_channels"]
        attention = 2 * hidden * (queries + keys) + queries * seq
    head = hidden * c["padded_vocab_size"] * (1 + ahead) + 2 * ahead * hidden**2
    return 6.0 * (mlp + (layers + ahead) * attention + head)


def rate(row: StepRow) -> float:
    """FLOP/s of a GPU."""
    c = cells(row)
    tokens = c["global_batch_size"] * c["seq_length"] / c["world_size"]
    return flop_per_token(c) * tokens / c["step_time_s"]


def traits(row: StepRow) -> tuple[str, int, bool]:
    """Device, bits of products, experts."""
    c = cells(row)
    bits = 16 if c.get("bf16") or c.get("fp16") else 32
    bits = 4 if "fp4" in c else 8 if "fp8" in c else bits
    device = next(name for name in GENERATIONS if name in c["device"].lower())
    return device, bits, "num_experts" in c


def alike(row: StepRow, others: list[StepRow]) -> list[StepRow]:
    """Those that share most with a row and are three or more."""
    size = flop_per_token(cells(row))
    same = [one for one in others if traits(one) == traits(row)]
    sized = [one for one in same if 0.25 <= flop_per_token(cells(one)) / size <= 4]
    if len(sized) >= 3:
        return sized
    for number in (3, 2, 1):
        step_rows = [one for one in others if traits(one)[:number] == traits(row)[:number]]
        if len(step_rows) >= 3:
            return step_rows
    assert traits(row)[0] == "gh200"  # the one device with fewer; its peak is that of an H100
    return [one for one in others if (*traits(one)[:2],) in {("gh200", 16), ("h100", 16)}]


def others_of(row: StepRow) -> list[StepRow]:
    """Without the row and whoever ran the same layout."""
    layout = same_layout(row.config)
    return [one for one in ROWS if one is not row and same_layout(one.config) != layout]


def drawn() -> list[StepRow]:
    """Ten rows, one of each table and device, then of those again."""
    draw = random.Random(SEED)
    kinds: dict[tuple[str, str], list[StepRow]] = {}
    for row in ROWS:
        kinds.setdefault((row.table, traits(row)[0]), []).append(row)
    order = draw.sample(sorted(kinds), len(kinds))
    return [draw.choice(kinds[order[place % len(order)]]) for place in range(10)]


def percent_slower(row: StepRow) -> float:
    """The true place; MFU where bits differ: 8-bit and 4-bit products have twice the peak."""
    alike_rows = alike(row, others_of(row))

    def of(one: StepRow) -> float:
        return rate(one) / (2 if traits(one)[1] < 16 else 1)

    return sum(of(one) < of(row) for one in alike_rows) / len(alike_rows)


def machine_of(row: StepRow) -> Any:
    """The step model of a machine whose one step is the row's."""
    return table_steps(row, [KnownStep.of(row)])


CHANGES: dict[str, Any] = {
    "recompute": lambda c: {
        "recompute": Recompute.NONE if c.recompute is Recompute.FULL else Recompute.FULL,
        "recompute_num_layers": 0,
        "recompute_modules": (),
    },
    "TP": lambda c: {"tp": 2 * c.parallelism.tp},
    "micro-batch": lambda c: {"micro_batch_size": 2 * c.batch.micro_batch_size},
    "PP": lambda c: {"pp": 2 * c.parallelism.pp, "vp": 1},
    "global batch": lambda c: {"global_batch_size": 2 * c.batch.global_batch_size},
}


def planted() -> Iterator[tuple[StepRow, StepRow, str]]:
    """Ten published rows, each with a run that differs in one drawn setting alone."""
    draw = random.Random(SEED + 1)
    for row in drawn():
        names = draw.sample(sorted(CHANGES), len(CHANGES))
        for name in names:
            try:
                config = changed(row.config, CHANGES[name](row.config))
            except ConfigError:
                continue
            before, after = machine_of(row).predict([row.config, config]).time_s
            time_s = row.measured_s * after / before
            yield row, replace(row, config=config, measured_s=time_s, machine="planted"), name
            break


_IGNORED_FIELDS = {"row_id", "step_time_s", "peak_memory_nbytes", "machine", "model"}
_COLUMNS = {
    frozenset({"tensor_model_parallel_size"}): "TP",
    frozenset({"pipeline_model_parallel_size"}): "PP",
    frozenset({"pipeline_model_parallel_size", "pipeline_model_parallel_layout"}): "PP",
    frozenset({"micro_batch_size"}): "micro-batch",
    frozenset({"global_batch_size"}): "global batch",
    frozenset({"world_size", "global_batch_size"}): "number of ranks",
    frozenset({"framework"}): "framework",
    frozenset({"fp8", "fp8_recipe", "fp8_param_gather"}): "fp8",
    frozenset({"fp8", "fp8_recipe"}): "fp8",
    frozenset({"fp8_recipe"}): "fp8",
}
"""Columns of a table that differ together, and the setting that they say."""


def pairs() -> list[tuple[StepRow, StepRow, str]]:
    """Ten pairs of published rows that differ in one setting by the columns of their table: of each
    setting and table one, then of those again."""
    draw = random.Random(SEED + 2)
    kinds: dict[tuple[str, str], list[tuple[StepRow, StepRow, str]]] = {}
    for one in ROWS:
        for other in ROWS:
            if one.table == other.table and one is not other:
                ours, theirs = cells(one), cells(other)
                names = {n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)}
                name = _COLUMNS.get(frozenset(names - _IGNORED_FIELDS))
                each = [c["global_batch_size"] / c["world_size"] for c in (ours, theirs)]
                if name and (name != "number of ranks" or each[0] == each[1]):
                    kinds.setdefault((name, one.table), []).append((one, other, name))
    order = draw.sample(sorted(kinds), len(kinds))
    return [draw.choice(kinds[order[place % len(order)]]) for place in range(10)]


def normal_answer(home: Path, capsys: Out, *words: str) -> dict[str, Any]:
    """The answer of the verb for programs, which its schema describes."""
    assert main(["normal", str(home), "--json", *words]) == ExitCode.ANSWER
    result = json.loads(capsys.readouterr().out)
    check(result, SCHEMA)
    return result


@pytest.mark.parametrize("row", drawn(), ids=lambda row: row.row_id[-40:])
def test_a_published_run_that_is_left_out_has_its_true_place(
    row: StepRow, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "steps.csv"
    canonical_frame([row]).to_csv(table, index=False)
    assert main(["import", "steps", str(table), "--out", str(tmp_path)]) == ExitCode.ANSWER
    capsys.readouterr()
    monkeypatch.setattr(placed, "published_rows", lambda: tuple(others_of(row)))
    result = normal_answer(tmp_path, capsys)
    assert result["slower_frac"] == pytest.approx(percent_slower(row), abs=1e-9)
    assert result["flop_per_s_per_gpu"] == pytest.approx(rate(row), rel=1e-3)
    assert len(result["near"]) == 3 and all("recipes" not in r["source"] for r in result["near"])


def test_the_run_itself_is_none_of_the_published_ones(tmp_path: Path, capsys: Out) -> None:
    for row in drawn():
        near = near_rows(row, machine_of(row), ROWS, {})
        assert row.row_id not in {one.row_id for one in near}


def first_of(near: Sequence[NearRow]) -> str:
    """The first setting that is named of the nearest run."""
    settings = near[0].settings
    return settings[0].name if settings else ""


@pytest.mark.slow
def test_the_setting_that_a_run_was_made_with_is_named_first() -> None:
    """At least 7 of 10; each is told against the published run that it was made of."""
    results = [
        (near_rows(run, machine_of(run), ROWS, {}), row, name) for row, run, name in planted()
    ]
    assert len(results) == 10
    right = [one[0].row_id == row.row_id and first_of(one) == n for one, row, n in results]
    assert sum(right) >= 7, right


def test_the_setting_that_two_published_runs_differ_in_is_named_first() -> None:
    """And where they lie 10 % apart or more the model says which is faster."""
    results = [(near_rows(one, machine_of(one), [other], {}), name) for one, other, name in pairs()]
    assert sum(first_of(one) == name for one, name in results) >= 7
    apart = [one[0] for one, _ in results if abs(one[0].rate_frac) >= 0.1]
    assert apart and all(one.rate_frac * one.modelled_frac > 0 for one in apart)


def test_a_group_is_told_beside_what_is_published_of_its_kind() -> None:
    run = planted_run(np.random.default_rng(1), name="one")
    row = {"run_id": run.run_id, "row": "collective", "kind": "all_reduce", "num_ranks": 8}
    row |= {"num_nodes": 1, "nbytes": 1 << 30, "time_s": 1.75 * (1 << 30) / 412e9}
    small = {**row, "nbytes": 1 << 20, "time_s": 1e-9}
    samples = normalise("samples", pd.DataFrame([row, small, {**row, "num_ranks": 3}]))
    runs = run.runs.assign(device="NVIDIA H100 80GB HBM3")
    table: SampleTable = replace(run, samples=samples, runs=runs)
    (result,) = bus_rates(table, read_frame(FOLDER / "bus_bandwidths.csv")).to_dict("records")
    assert result["bytes_per_s"] == pytest.approx(412e9)
    assert result["low_bytes_per_s"] == 341e9 and result["high_bytes_per_s"] == 482e9
