"""Ranks of a node without torchrun: what the launcher's own variables say."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forerun.hooks.process import settings  # noqa: E402
from forerun.hooks.process.ranks import current_rank  # noqa: E402


@pytest.fixture
def sixth_of_eight(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*settings.LOCAL_RANKS, *settings.LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("is_available", True), ("is_initialized", True)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    return monkeypatch


@pytest.mark.parametrize(
    ("environ", "local_rank", "local_world_size"),
    [
        ({}, 5, 8),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_LOCALID": "3"}, 1, 4),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, 4),
        ({"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}, 1, 4),
        ({"SLURM_NTASKS_PER_NODE": "64"}, 5, 8),
        ({"LOCAL_WORLD_SIZE": "many", "LOCAL_RANK": "-1"}, 5, 8),
        ({"LOCAL_WORLD_SIZE": "0"}, 5, 1),
    ],
)
def test_ranks_of_a_node_by_launcher(
    sixth_of_eight: pytest.MonkeyPatch,
    environ: dict[str, str],
    local_rank: int,
    local_world_size: int,
) -> None:
    for name, value in environ.items():
        sixth_of_eight.setenv(name, value)
    rank_info = current_rank()
    assert (rank_info.rank, rank_info.world_size) == (5, 8)
    assert (rank_info.local_rank, rank_info.local_world_size) == (local_rank, local_world_size)
