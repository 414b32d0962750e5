"""A machine that was imported: steps alone, of a device whose data sheet is known or not."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from forerun.calib.memory.peak import Verdict
from forerun.calib.workload.config import Sharding
from forerun.launch.known.machines import open_machine
from forerun.launch.known.table_files import import_table, read_imported
from forerun.launch.opened.run import load
from tests.launch.known.test_other_kinds import PUBLISHED

MACHINE = "H100 DGXC BF16"
BOARD_NBYTES = 80 * 2**30
"""NVIDIA's data sheet of the H100 SXM."""


@pytest.mark.parametrize(("device", "is_known"), [("H100", True), ("our own accelerator", False)])
def test_its_memory_is_that_of_its_device(device: str, is_known: bool, tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    pd.read_csv(PUBLISHED).assign(device=device).to_csv(table, index=False)
    import_table(table, tmp_path)
    capacity_nbytes = open_machine(tmp_path, machine=MACHINE).budget.capacity_nbytes
    assert (capacity_nbytes is not None) is is_known
    plan_answer = load(tmp_path, machine=MACHINE).plan(keep={"tp": 4, "mbs": 1})
    verdicts = {one.verdict for one in plan_answer.candidates}
    assert (Verdict.UNKNOWN in verdicts) is not is_known
    if capacity_nbytes is not None:
        assert capacity_nbytes == pytest.approx(BOARD_NBYTES, rel=0.01)
        assert plan_answer.candidates[0].memory.total_nbytes < BOARD_NBYTES


def test_what_a_table_says_of_sharding_is_read_or_told(tmp_path: Path) -> None:
    """Rows under FSDP come back as they were said; a column that nothing reads is named, and
    one that decides how a model is split refuses its rows."""
    rows = pd.read_csv(PUBLISHED)
    plain = rows[rows["pipeline_model_parallel_size"].fillna(1) == 1].head(2)
    table = tmp_path / "steps.csv"
    plain.assign(fsdp=["optim_grads", "true"], colour="blue").to_csv(table, index=False)
    written = import_table(table, tmp_path)
    assert written.skipped == ("the column colour, which nothing reads",)
    shardings = [row.config.parallelism.sharded for row in read_imported(tmp_path).steps]
    assert shardings == [Sharding.GRADS, Sharding.WEIGHTS]
    plain.assign(zero_stage=[0, 2]).to_csv(table, index=False)
    (refused,) = import_table(table, tmp_path).skipped
    assert "zero_stage '2' is DeepSpeed's" in refused
    plain.assign(shard_mode=["", "full"]).to_csv(table, index=False)
    excluded = import_table(table, tmp_path).skipped
    assert [text.partition(": ")[2].partition(" is")[0] for text in excluded[:1]] == [
        "shard_mode 'full'"
    ]
