"""Step times given to users are those that are validated: one place computes them."""

from __future__ import annotations

import ast
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from forerun.benchmarks.protocols.scores import step_folds
from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.calib.importers.canonical_steps import canonical_frame, read_steps
from forerun.calib.importers.canonical_tables import read_table
from forerun.calib.records.step_rows import StepRow
from forerun.calib.steps.known_steps import same_layout
from forerun.launch.cli import main
from forerun.launch.known.machines import open_machine

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "recipes" / "published"
SETS = {
    "steps_simumax_b200_8gpu.csv.gz": 3,
    "steps_vtrain_multi_node.csv.gz": 5,
    "steps_sailor.csv.gz": 3,
    "steps_megatron_bridge.csv.gz": 3,
    "steps_dgxc_scaling.csv.gz": 2,
}


def rows_of(name: str) -> tuple[StepRow, ...]:
    return read_steps(pd.read_csv(PUBLISHED / name, low_memory=False), name).rows


def parts(name: str, num_known: int) -> tuple[list[StepRow], list[StepRow]]:
    """Rows that calibrate and rows that are scored, as a protocol draws them."""
    rows = rows_of(name)
    fold = max(step_folds(rows, num_known, 1), key=lambda one: len(one.test))
    blind = [replace(rows[i], measured_s=nan, measured_memory_nbytes=None) for i in fold.test]
    return [rows[i] for i in fold.train], blind


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory that the rows of a set are imported into."""
    return tmp_path / "machine"


def imported(rows: list[StepRow], directory: Path, *tables: Path) -> None:
    path = directory.with_name("known.csv")
    canonical_frame(rows).to_csv(path, index=False)
    assert main(["import", "steps", str(path), *map(str, tables), "--out", str(directory)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_door_of_predict_says_what_the_validation_scores(name: str, directory: Path) -> None:
    known, unseen = parts(name, SETS[name])
    imported(known, directory)
    predicted = open_machine(directory).steps.predict([row.config for row in unseen])
    scored = TableSteps().fit(known).predict(unseen)
    for ours, theirs in ((predicted.time_s, scored.time_s), (predicted.high_s, scored.high_s)):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_with_operators_as_well(directory: Path) -> None:
    known, unseen = parts("steps_simumax_b200_8gpu.csv.gz", 3)
    table = directory.with_name("products.csv")
    shapes = ("8192x4096x4096", "8192x4096x8192", "8192x8192x4096")
    pd.DataFrame(
        {
            "device": "NVIDIA B200",
            "group": "product",
            "kind": "linear",
            "phase": "forward",
            "shape": shapes,
            "element_nbytes": 2,
            "time_s": [3e-4, 6e-4, 6e-4],
        }
    ).to_csv(table, index=False)
    imported(known, directory, table)
    predicted = open_machine(directory).steps.predict([row.config for row in unseen])
    published = read_table(pd.read_csv(table), "products")
    scored = TableSteps([published]).fit(known).predict(unseen)
    assert predicted.time_s == pytest.approx(scored.time_s, rel=1e-6)
    bare = TableSteps().fit(known).predict(unseen)
    assert np.abs(np.log(bare.time_s / scored.time_s)).max() > 1e-3


def test_a_measured_exchange_of_experts_changes_what_a_fused_dispatcher_takes(
    tmp_path: Path,
) -> None:
    """Tokens that go to eight experts on 2 and 4 nodes; the same table ten times slower."""
    rows = {row.row_id: row for row in rows_of("steps_megatron_bridge.csv.gz")}
    known, target_config = rows["mb_190"], rows["mb_194"].config
    tokens = 2.0 ** np.arange(8, 17)
    nbytes = {nodes: tokens * 7168 * 2 * copies for nodes, copies in ((2, 6.6), (4, 7.2))}
    times_s = []
    for rate in (400e9, 40e9):
        measured = [
            {
                "device": "NVIDIA H100 80GB HBM3",
                "fabric": "cluster",
                "collective": "all_to_all",
                "num_ranks": 8 * nodes,
                "num_nodes": nodes,
                "nbytes": int(payload),
                "time_s": 6e-5 + payload / rate,
                "num_chosen": 8,
            }
            for nodes, payloads in nbytes.items()
            for payload in payloads
        ]
        directory, table = tmp_path / f"at {rate:.0e}" / "machine", tmp_path / "exchange.csv"
        directory.parent.mkdir()
        pd.DataFrame(measured).to_csv(table, index=False)
        imported([known], directory, table)
        times_s.append(open_machine(directory).steps.predict([target_config]).time_s[0])
    assert times_s[1] > 1.1 * times_s[0]


def test_a_layout_that_was_measured_takes_what_was_measured(directory: Path) -> None:
    known, _ = parts("steps_simumax_b200_8gpu.csv.gz", 3)
    imported(known, directory)
    machine = open_machine(directory)
    assert same_layout(machine.running) == same_layout(known[-1].config)
    estimate = machine.steps.estimate(known[0].config)
    assert estimate.time_s == pytest.approx(known[0].measured_s, rel=1e-3)
    assert estimate.high_s / estimate.time_s < 1.03


def test_machines_are_told_apart_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = PUBLISHED / "steps_megatron_bridge.csv.gz"
    assert main(["import", "steps", str(path), "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path)]) == 2
    assert "--machine 'GB300 Megatron-Bridge" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), "--machine", "H100"]) == 2
    assert "'H100' is not among" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), "--machine", "H100 Megatron-Bridge BF16"]) == 0


def test_a_damaged_table_is_named_and_the_rest_is_read(directory: Path) -> None:
    known, _ = parts("steps_sailor.csv.gz", 3)
    imported(known, directory)
    (directory / "imported" / "other-steps.csv").write_text("a,b\n1,2\n")
    machine = open_machine(directory)
    assert len(machine.steps.known) == len(known)
    assert any("other-steps.csv is skipped" in one for one in machine.problems)


TIMING = {"evaluate", "simulate", "steady"}
RE_SIMULATES = {"calib/drift/stragglers.py"}
"""Modules that simulate what a slow stage costs the measured pipeline, and predict no layout."""


def test_nothing_else_computes_a_step_time() -> None:
    wrong = []
    for path in sorted(ROOT.glob("calib/**/*.py")) + sorted(ROOT.glob("launch/**/*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("calib/timeline/", "calib/steps/")) or name in RE_SIMULATES:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            parts = node.module.split(".")
            # Classes hold what was computed elsewhere.
            names = {alias.name for alias in node.names if not alias.name[0].isupper()}
            if "timeline" in parts and (names & TIMING or (names and parts[-1] in TIMING)):
                wrong.append(f"{name} imports {node.module}")
    assert not wrong
