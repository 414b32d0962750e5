"""Variables of a launch line: which are read, which say that a step is another one."""

from __future__ import annotations

from itertools import combinations

import pytest

from forerun.calib.arguments.launchers import reason, split_variables
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.megatron_options import NAMES
from forerun.calib.arguments.shell_text import commands
from forerun.calib.lint._variable_rules import RULES
from forerun.calib.workload.config import Attention

LINE = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 16 --vocab-size 512"
)
ONE_NODE = LINE.replace("--nnodes 2 ", "")
KINDS = ("modelled", "left_out", "left_out_between_nodes", "aside_unless", "harmless")


def test_a_variable_is_in_one_list_alone() -> None:
    table = NAMES["variables"]
    for one, other in combinations(KINDS, 2):
        assert not set(table[one]) & set(table[other]), (one, other)
    assert all(reason(name) for kind in KINDS[1:3] for name in table[kind])


def test_what_doctor_looks_for_is_in_the_table() -> None:
    known = {name for kind in KINDS for name in NAMES["variables"][kind]}
    assert {rule.name for rule in RULES} - {"OMP_NUM_THREADS"} <= known


@pytest.mark.parametrize(
    ("front", "unmodelled", "unknown"),
    [
        ("NCCL_ALGO=Ring", ("NCCL_ALGO",), ()),
        ("env CUDA_LAUNCH_BLOCKING=1", ("CUDA_LAUNCH_BLOCKING",), ()),
        ("CUDA_LAUNCH_BLOCKING=0", (), ()),
        ("mpirun -x NCCL_PROTO=LL env", ("NCCL_PROTO",), ()),
        ("srun --export=ALL,NCCL_IB_DISABLE=1", ("NCCL_IB_DISABLE",), ()),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO=0", ("NVTE_ALLOW_NONDETERMINISTIC_ALGO",), ()),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO=1", (), ()),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG=WARN MASTER_ADDR=a", (), ()),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", (), ()),
        ("NCCL_OF_TOMORROW=1", (), ("NCCL_OF_TOMORROW",)),
    ],
)
def test_a_variable_is_read_as_an_option_is(
    front: str, unmodelled: tuple[str, ...], unknown: tuple[str, ...]
) -> None:
    description = config_from_command([*front.split(), *LINE.split()])
    assert (description.config.unmodelled, description.unknown) == (unmodelled, unknown)


def test_what_joins_nodes_changes_no_single_one() -> None:
    words = ["NCCL_IB_DISABLE=1", *ONE_NODE.split()]
    assert not config_from_command(words).config.unmodelled


@pytest.mark.parametrize(
    ("front", "options", "attention"),
    [
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "", Attention.UNFUSED),
        ("NVTE_FLASH_ATTN=0", "", Attention.AUTO),
        ("NVTE_FUSED_ATTN=0 NVTE_FLASH_ATTN=1", "", Attention.AUTO),
        ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "--attention-backend flash", Attention.FUSED),
    ],
)
def test_without_fused_kernels_attention_is_unfused(
    front: str, options: str, attention: Attention
) -> None:
    description = config_from_command([*front.split(), *LINE.split(), *options.split()])
    assert description.config.attention is attention and not description.config.unmodelled


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("export NCCL_ALGO=Ring\npython t.py", {"NCCL_ALGO": "Ring"}),
        ("A=Ring\nexport B=1 NCCL_ALGO=$A\npython t.py", {"NCCL_ALGO": "Ring"}),
        ("NCCL_ALGO=Ring\nexport NCCL_ALGO\npython t.py", {"NCCL_ALGO": "Ring"}),
        ("NCCL_ALGO=Ring\npython t.py", {}),
        ("NCCL_ALGO=Ring; python t.py", {}),
        ("NCCL_ALGO=Ring python t.py", {"NCCL_ALGO": "Ring"}),
        ("NCCL_ALGO=Ring python a.py\npython t.py", {}),
        ("export NCCL_ALGO=Ring\nunset NCCL_ALGO\npython t.py", {}),
        ("export HOME=/root DATA=/d\npython t.py", {}),
    ],
)
def test_a_script_gives_what_it_exports(script: str, expected: dict[str, str]) -> None:
    variables, rest = split_variables(commands(script)[-1])
    assert (variables, rest) == (expected, ("python", "t.py"))
