"""A Llama in loops of one's own: what the layout is taken for, on four real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import torchrun

from forerun.calib.samples.store import read_run

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
