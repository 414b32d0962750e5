"""Launch lines inside scripts, through the verbs: read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.calib.arguments.launchers import ranks_of
from forerun.calib.arguments.megatron_command import config_from_command, split_launcher
from forerun.calib.errors import ConfigError
from forerun.launch.cli import main
from forerun.launch.options.launch_scripts import inner_launch_line

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


@pytest.mark.parametrize("word", ["source", ".", "[ -f", "[[ -f", "test -f"])
def test_a_script_that_is_only_named_is_not_the_launch(tmp_path: Path, word: str) -> None:
    """verl's examples read their settings by ``[ -f "$HERE/env.sh" ] && source "$HERE/env.sh"``."""
    end = {"[": " ]", "[[": " ]]"}.get(word.partition(" ")[0], "")
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nproc-per-node 2 t.py\n{word} $HERE/env.sh{end} && echo\n")
    assert inner_launch_line(["bash", str(path)]) == ("torchrun", "--nproc-per-node", "2", "t.py")


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


SIZES = "--num-layers 70 --hidden-size 14336 --seq-length 2048"
# Launches as in public scripts, in their form with sizes of one model, and the ranks they start.
PUBLIC = {
    "bigscience train/tr11-176B-ml/tr11-176B-ml.slurm": (
        "#SBATCH --nodes=24\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"
        'GPUS_PER_NODE=8\nNNODES=$SLURM_NNODES\ncat <<EOT > $config_json\n{ "stage": 0 }\nEOT\n'
        'export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE '
        '--nnodes $NNODES "\nexport CMD="`pwd`/pretrain_gpt.py SIZES "\necho $CMD\n'
        'clear; srun --wait=60 bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee log',
        (192, 8),
    ),
    "bigscience experiments/gpt2-meg/meg_gpt2_base_n64.slurm": (
        "#SBATCH --nodes=64\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n"
        "NNODES=64\nexport LAUNCHER='python -m torch.distributed.launch --nproc_per_node 4 '\n"
        'LAUNCHER+="--nnodes $NNODES"\nexport CMD="`pwd`/pretrain_gpt.py SIZES"\n'
        "srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'",
        (256, 4),
    ),
    "stas00/ml-engineering orchestration/slurm/launchers/srun-launcher.slurm": (
        "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8\n"
        "LAUNCHER='python -u'\nsrun --jobid $SLURM_JOB_ID bash -c \"$LAUNCHER train.py SIZES\"",
        (16, 8),
    ),
    "coreweave/reference-architecture pull request 15, a script within srun": (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n"
        "srun --kill-on-bad-exit=1 \\\n  bash <<'EOF'\nexport WORLD_SIZE=\"${SLURM_NTASKS:?}\"\n"
        "python pretrain_gpt.py SIZES\nEOF\n",
        (32, 8),
    ),
    "awslabs 3.test_cases/megatron/megatron-lm/slurm/llama3/pretrain-llama3-8b.sbatch": (
        '#SBATCH --nodes=2\n: "${LAYERS:=70}"\ndeclare -a TORCHRUN_ARGS=(\n'
        "    --nproc_per_node=8\n    --nnodes=$SLURM_JOB_NUM_NODES\n)\n"
        'srun -l python -m torch.distributed.run "${TORCHRUN_ARGS[@]}" '
        "/workspace/Megatron-LM/pretrain_gpt.py --num-layers $LAYERS --hidden-size 14336",
        (16, 8),
    ),
    "pytorch/torchtitan multinode_trainer.slurm": (
        "#SBATCH --ntasks=4\n#SBATCH --nodes=4\nMODULE=${MODULE:-llama3}\n"
        "dcgmi profile --pause\nsrun torchrun --nnodes 4 --nproc_per_node 8 "
        '-m torchtitan.train --module ${MODULE} --num-layers 70 "$@"\ndcgmi profile --resume',
        (32, 8),
    ),
}


@pytest.mark.parametrize("text, ranks", PUBLIC.values(), ids=PUBLIC)
def test_public_scripts_start_the_ranks_of_their_directives(
    tmp_path: Path, text: str, ranks: tuple[int, int]
) -> None:
    path = tmp_path / "run.sbatch"
    path.write_text(text.replace("SIZES", SIZES))
    launcher, words = split_launcher(inner_launch_line(["sbatch", str(path)]))
    result = ranks_of(launcher)
    assert (result.num_ranks, result.per_node) == ranks
    assert words[words.index("--num-layers") + 1] == "70"


def test_arguments_of_a_script_reach_the_training_command(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text('torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 "$@"\n')
    assert inner_launch_line(["bash", str(path), *SIZES.split()])[-6:] == tuple(SIZES.split())
