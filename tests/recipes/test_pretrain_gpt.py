"""The pre-training recipe in real launches: every layout is the same model on the same data.

Only real processes have Megatron's collectives between them.  The truth is another layout, or the
same run without an interruption: nothing in Megatron's tensor parallelism, schedules, optimizers or
recomputation may change what is computed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched import Launch

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
SMALL = ("--hidden-size", "32", "--seq-length", "32", "--global-batch-size", "8",
         "--lr-decay-iters", "10")  # fmt: skip
TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
MODERN = ("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--normalization",
          "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear",
          "--untie-embeddings-and-output-weights")  # fmt: skip
FULL = ("--recompute-granularity", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Output of a launch: per step the loss, its exact bits and the gradient norm."""

    losses: dict[int, float]
    bits: dict[int, str]
    norms: dict[int, float]
    validation: dict[int, str]
    output: str


def command(num_ranks: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_ranks), str(RECIPE), *SMALL, *arguments]


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if "FORERUN" not in key}
    return clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def read(output: str) -> Run:
    step = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) \| loss bits (\S+) \| grad norm: (\S+)")
    rows = [(int(match[1]), *match.groups()[1:]) for match in step.finditer(output)]
    checks = re.findall(r"validation loss at iteration (\d+) .* loss bits (\S+)", output)
    return Run(
        losses={step: float(loss) for step, loss, _, _ in rows},
        bits={step: bits for step, _, bits, _ in rows},
        norms={step: float(norm) for step, _, _, norm in rows},
        validation={int(step): bits for step, bits in checks},
        output=output,
    )


Train = Callable[..., Run]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Launches so many ranks with these arguments."""
    home = tmp_path_factory.mktemp("trained")

    def launch(num_ranks: int, *arguments: str) -> Run:
        words = ("--standalone", "--nproc-per-node", num_ranks, RECIPE, *SMALL, *arguments)
        environ = {"CUDA_VISIBLE_DEVICES": ""}
        return read(Launch(home, *words, num_workers=num_ranks, **environ).end_well().stdout)

    return launch


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    return train(1, "--train-iters", "3")


@pytest.fixture(scope="module")
def modern(train: Train) -> Run:
    return train(1, *MODERN, "--train-iters", "3")


@pytest.fixture(scope="module")
def dropped(train: Train) -> Run:
    """Six steps with dropout, sharded optimizer, evaluation, uninterrupted."""
    return train(2, *SHARDED, *WITH_DROPOUT, "--train-iters", "6")


WITH_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--eval-interval", "2",
                "--eval-iters", "1")  # fmt: skip


def assert_same(run: Run, truth: Run) -> None:
    """Equal but for the order of float32 sums."""
    assert run.losses.keys() == truth.losses.keys()
    assert run.losses == pytest.approx(truth.losses, rel=2e-6)
    assert run.norms == pytest.approx(truth.norms, rel=1e-4)


def test_it_learns(one_rank: Run) -> None:
    assert list(one_rank.losses) == [1, 2, 3]
    assert 5.3 < one_rank.losses[1] < 5.7  # ln 256 = 5.545
    assert one_rank.losses[3] < one_rank.losses[1]


@pytest.mark.parametrize(
    "layout",
    [
        (),
        TENSOR,
        (*TENSOR, "--sequence-parallel"),
        PIPELINE,
        (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1"),
    ],
    ids=["dp2", "tp2", "tp2-sp", "pp2", "pp2-vpp2"],
)
def test_two_ranks_train_what_one_trains(
    train: Train, one_rank: Run, layout: tuple[str, ...]
) -> None:
    assert_same(train(2, *layout, "--train-iters", "3"), one_rank)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, (*TENSOR, "--sequence-parallel", "--recompute-granularity", "selective")),
        (4, (*TENSOR, *SHARDED, *FULL)),
    ],
    ids=["tp2-sp-selective", "tp2-dp2-sharded-full"],
)
def test_a_llama_like_model_is_the_same_too(
    train: Train, modern: Run, num_ranks: int, layout: tuple[str, ...]
) -> None:
    assert_same(train(num_ranks, *MODERN, *layout, "--train-iters", "3"), modern)


def test_a_resumed_run_is_the_uninterrupted_one(train: Train, dropped: Run, tmp_path: Path) -> None:
    shared = (*SHARDED, *WITH_DROPOUT, "--train-iters", "6")
    save = ("--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "3")
    first = train(2, *shared, *save)
    assert "exiting at iteration 3: exit interval 3" in first.output
    rest = train(2, *shared, "--load", str(tmp_path))
    assert list(rest.bits) == [4, 5, 6]
    assert first.bits | rest.bits == dropped.bits
    assert first.validation | rest.validation == dropped.validation
    assert len(set(dropped.validation.values())) == 3


def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    arguments = ("--train-iters", "100000", "--exit-signal-handler", "--save", str(tmp_path))
    with subprocess.Popen(
        command(2, *PIPELINE, *arguments), env=environment(), text=True, stdout=subprocess.PIPE
    ) as launch:
        assert launch.stdout is not None
        lines = []
        for line in launch.stdout:
            lines.append(line)
            if re.search(r"iteration +2/", line):
                launch.send_signal(signal.SIGTERM)
    output = "".join(lines)
    match = re.search(r"exiting at iteration (\d+): signal SIGTERM", output)
    assert match is not None, output[-3000:]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == match[1]
    assert len(list(tmp_path.glob(f"iter_{int(match[1]):07d}/rank_*.pt"))) == 2
