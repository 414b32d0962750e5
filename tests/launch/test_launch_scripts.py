"""Launch lines inside scripts, through the verbs: read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.errors import ConfigError
from forerun.launch.cli import main
from forerun.launch.options.config_files import inner_launch_line

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
touch {touched}
GBS=64
SIZES=(
    --num-layers 4
    --hidden-size 256  # small
    --num-attention-heads 4
)
ARGS="${{SIZES[@]}} --seq-length 128 --max-position-embeddings 128 --vocab-size 512 --bf16 \\
    --micro-batch-size 2 --global-batch-size $GBS"
CMD="torchrun --nproc-per-node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES $ROOT/pretrain_gpt.py"
{start} > log.txt 2>&1
"""
STARTS = ("$CMD $ARGS", 'srun --wait 60 bash -c "numactl -N 0 $CMD $ARGS"', 'bash -lc "$CMD $ARGS"')


@pytest.fixture(params=STARTS)
def script(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.format(start=request.param, touched=tmp_path / "touched"))
    return path


@pytest.mark.parametrize("front", ["bash", "sbatch --job-name x", "", "srun -N 2 bash -e"])
def test_the_line_inside_is_that_of_the_run(script: Path, front: str) -> None:
    config = config_from_command(inner_launch_line([*front.split(), str(script)])).config
    par, batch = config.parallelism, config.batch
    assert (config.model.num_layers, config.model.hidden_size) == (4, 256)
    assert (par.num_ranks, par.ranks_per_node, batch.global_batch_size) == (8, 4, 64)
    assert not (script.parent / "touched").exists()


def test_options_of_sbatch_go_before_directives(script: Path) -> None:
    words = inner_launch_line(["sbatch", "--nodes=4", str(script)])
    assert config_from_command(words).config.parallelism.num_ranks == 16


def test_a_line_without_a_script_is_left_alone() -> None:
    words = ("torchrun", "--nproc-per-node", "2", "t.py", "--data", "run.sh", "bash")
    assert inner_launch_line(words) == words
    module = ("torchrun", "--nproc-per-node", "2", "-m", "pkg.train", "--hook", "run.sh")
    assert inner_launch_line(module) == module


def test_a_script_may_be_named_from_here(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    for words in (["sbatch", "./run.sh"], ["bash", "./run.sh"], ["./run.sh"]):
        assert config_from_command(inner_launch_line(words)).config.parallelism.num_ranks == 8


def test_what_cannot_be_read_says_how_to_give_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the launch line itself"):
        inner_launch_line(["bash", str(tmp_path / "none.sh")])
    path = tmp_path / "loop.sh"
    path.write_text("for n in 1 2; do\n  torchrun t.py --num-layers $n\ndone\n")
    with pytest.raises(ConfigError, match="give the launch line itself"):
        inner_launch_line(["bash", str(path)])
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        inner_launch_line(["bash", str(path)])


def test_doctor_reads_a_batch_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--", "sbatch", str(script)]) == 0
    assert "--overlap-grad-reduce" in capsys.readouterr().out
