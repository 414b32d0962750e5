"""A Llama in loops of one's own: what the layout is taken for, on four real ranks.

Meshes and shards of real ranks are what a layout is read from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import torchrun

from forerun.calib.layers.stage_work import step_operators
from forerun.calib.records.record_kinds import OperatorRecord
from forerun.calib.samples.store import read_run
from forerun.calib.workload.operators import Phase

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "support" / "plain_llama.py"
KINDS = ("fsdp2", "hsdp", "ddp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("llama")
    torchrun(directory, SCRIPT, directory, *KINDS, num_ranks=4)
    return directory


@pytest.mark.parametrize(
    ("kind", "copies", "is_sharded"), [("fsdp2", 1, True), ("hsdp", 2, True), ("ddp", 1, False)]
)
def test_a_plain_loop_is_described_with_its_shards_and_copies(
    trained: Path, kind: str, copies: int, is_sharded: bool
) -> None:
    config = read_run(trained / f"{KINDS.index(kind)}-{kind}").configs[0]
    assert config is not None
    layout = config.parallelism
    assert (layout.dp, layout.num_optimizer_instances) == (4, copies)
    assert layout.is_optimizer_distributed is is_sharded


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_on_record_is_the_one_that_the_layout_has(trained: Path, kind: str) -> None:
    """Parameters of a shard, and calls of AdamW on thirty sharded tensors: none in DDP."""
    run = read_run(trained / f"{KINDS.index(kind)}-{kind}")
    config = run.configs[0]
    assert config is not None
    (operator, _), _ = step_operators(config, 0)
    seen = {
        (one.kind, one.shape)
        for one in run.records[0]
        if isinstance(one, OperatorRecord) and one.phase is Phase.STEP
    }
    assert seen == {(operator.kind, operator.shape)}
    assert operator.shape[1:] == (() if kind == "ddp" else (8 * 30,))
