"""Ranks that launch lines say, by each launcher's own manual."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.arguments.launchers import ranks_of
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.errors import ConfigError

SIZES = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 64 --vocab-size 128"
)
PATHS = ("--data-path", "0.5", "a", "0.5", "b", "--lr", "1e-4", "--save", "out")
STATED = [
    ("torchrun --nproc-per-node 8 --nnodes 4", 32, 8),
    ("torchrun --nproc_per_node=8 --nnodes=2:4 --rdzv-backend c10d", 32, 8),
    ("torchrun --nproc-per-node 2 -m", 2, 2),
    ("python -m torch.distributed.run --nproc-per-node 4", 4, 4),
    ("python3 -u -m torch.distributed.launch --nproc_per_node 8 --nnodes 4", 32, 8),
    ("deepspeed --num_nodes 4 --num_gpus 8 --hostfile hosts", 32, 8),
    ("deepspeed --include a:0,1,2,3@b:0,1,2,3", 8, 4),
    ("accelerate launch --num_processes 32 --num_machines 4", 32, 8),
    ("srun -N 4 --ntasks-per-node 8 python", 32, 8),
    ("srun -N4 -n32 --gpus-per-task=1 python", 32, 8),
    ("srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8", 16, 8),
    ("mpirun -np 32 -npernode 8 -x PATH python", 32, 8),
    ("mpirun -H a:8,b:8 python", 16, 8),
    ("mpirun --map-by ppr:4:node -np 16 python", 16, 4),
    ("mpiexec -n 16 -ppn 8 python", 16, 8),
    ("env WORLD_SIZE=32 LOCAL_WORLD_SIZE=8 python", 32, 8),
    ("OMPI_COMM_WORLD_SIZE=16 OMPI_COMM_WORLD_LOCAL_SIZE=8 python", 16, 8),
]
OPEN = (
    "torchrun --nproc-per-node gpu", "torchrun --nproc-per-node auto --nnodes 2",
    "torchrun --nproc-per-node $GPUS", "deepspeed --hostfile hosts", "deepspeed --num_nodes 2",
    "accelerate launch --config_file c.yaml", "srun -N 4 python", "mpirun --hostfile h python",
    "deepspeed --include a@b",
)  # fmt: skip


@pytest.mark.parametrize(("line", "num_ranks", "per_node"), STATED)
def test_a_launcher_says_the_ranks(line: str, num_ranks: int, per_node: int) -> None:
    ranks = ranks_of(shlex.split(line))
    assert (ranks.num_ranks, ranks.per_node) == (num_ranks, per_node)
    described = config_from_command([*shlex.split(line), *SIZES.split(), *PATHS], usual_ranks=2)
    par = described.config.parallelism
    assert (par.num_ranks, par.ranks_per_node, described.unknown) == (num_ranks, per_node, ())


@pytest.mark.parametrize("line", OPEN)
def test_ranks_that_are_left_open_are_asked_for(line: str) -> None:
    words = [*shlex.split(line), *SIZES.split()]
    with pytest.raises(ConfigError, match="--gpus N"):
        config_from_command(words, usual_ranks=2)
    assert config_from_command(words, num_ranks=8).config.parallelism.num_ranks == 8


@pytest.mark.parametrize(
    ("line", "per_node"),
    [
        *(("torchrun --nproc-per-node gpu", 8), ("torchrun --nproc-per-node $GPUS", 8)),
        *(("srun -n 64 python", 8), ("mpirun -np 64 python", 8), ("python", 8)),
        *(("accelerate launch --num_processes 64", 8), ("WORLD_SIZE=64 python", 8)),
        *(("torchrun --nproc-per-node gpu --nnodes 16", 4), ("srun -N 16 -n 64 python", 4)),
        *(("deepspeed --num_nodes 16", 4), ("mpirun -np 64 -H a,b,c,d python", 16)),
        *(
            ("torchrun --nproc-per-node 4 --nnodes $NODES", 4),
            ("srun --ntasks-per-node=4 python", 4),
        ),
    ],
)
def test_ranks_of_a_node_that_are_left_open_are_those_of_a_server_and_said(
    line: str, per_node: int
) -> None:
    """As many as where nothing is launched; one node of 64 has no transfers between nodes."""
    described = config_from_command([*shlex.split(line), *SIZES.split()], num_ranks=64)
    assert described.config.parallelism.ranks_per_node == per_node
    is_open = per_node == 8
    assert any("8 ranks a node assumed" in note for note in described.notes) is is_open


@given(
    st.sampled_from([2, 4, 8, 16, 32, 64]),
    st.sampled_from(["srun -n N python", "accelerate launch --num_processes=N"]),
)
def test_no_launch_is_of_one_node_for_want_of_a_number(num_ranks: int, line: str) -> None:
    words = [*line.replace("N", str(num_ranks)).split(), *SIZES.split()]
    assert config_from_command(words).config.parallelism.ranks_per_node == 8


def test_without_a_launcher_the_usual_ones_count() -> None:
    assert config_from_command(SIZES.split(), usual_ranks=4).config.parallelism.num_ranks == 4


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from(["--nproc-per-node", "="]))
def test_nodes_times_ranks_of_a_node(nodes: int, per_node: int, way: str) -> None:
    each = f"--nproc_per_node={per_node}" if way == "=" else f"{way} {per_node}"
    ranks = ranks_of(f"torchrun --nnodes {nodes} {each} --rdzv-endpoint h:29500".split())
    assert (ranks.num_ranks, ranks.per_node) == (nodes * per_node, per_node)
