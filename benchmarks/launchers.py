"""Every launcher with every framework: does ``--calibrate`` attach, and what does it answer?

    python benchmarks/launchers.py [--clone MEGATRON_LM] [--launchers NAME ...]
        [--frameworks NAME ...] [--models NAME ...] [--steps N]

A cell is a real launch of ``runs/launched_loop.py``, or of the clone's ``pretrain_gpt.py``, over
gloo on this machine.  Slurm and Open MPI are stood in for by processes with their variables.  Needs
transformers, accelerate, lightning and, for their rows, deepspeed, and Megatron-LM's six and regex.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.megatron_matrix import MODEL

PROGRAM = Path(__file__).parent / "runs" / "launched_loop.py"
FRAMEWORKS = ("megatron", "trainer", "lightning", "ddp", "fsdp2", "deepspeed")
MODELS = ("dense", "experts")
TIMEOUT_S = 240
COLUMNS = ("launcher", "ranks", "framework", "model", "attached", "finish", "layouts", "line")
_EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]
_ELASTIC = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes")
_WHY = re.compile(
    r"\[forerun\] (no layout|no answer|nothing trained|left to|taken.*;|other layouts)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How processes start: words before the program, or variables of each rank.

    In ``variables`` ``{r}`` is the rank and ``{n}`` the number of ranks.
    """

    num_ranks: int
    words: tuple[str, ...] = ()
    variables: Mapping[str, str] | None = None
    frameworks: tuple[str, ...] = FRAMEWORKS


_SLURM = {
    "SLURM_PROCID": "{r}", "SLURM_LOCALID": "{r}", "SLURM_NTASKS": "{n}", "SLURM_JOB_ID": "7",
    "SLURM_NTASKS_PER_NODE": "{n}", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
    "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost",
}  # fmt: skip
_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{r}", "OMPI_COMM_WORLD_SIZE": "{n}", "PMIX_NAMESPACE": "prterun-7@1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{r}", "OMPI_COMM_WORLD_LOCAL_SIZE": "{n}",
}  # fmt: skip
_OF_LOOPS = tuple(name for name in FRAMEWORKS if name != "lightning")
LAUNCHERS: dict[str, tuple[Launcher, ...]] = {
    "torchrun": tuple(Launcher(num_ranks=n, words=(*_ELASTIC, str(n))) for n in (1, 2)),
    "srun": tuple(Launcher(num_ranks=n, variables=_SLURM) for n in (1, 2)),
    "mpirun": tuple(
        Launcher(num_ranks=n, variables=_OPEN_MPI, frameworks=_OF_LOOPS) for n in (1, 2)
    ),
    "accelerate launch": (
        Launcher(num_ranks=1, words=(*_ACCELERATE, "1", "--cpu"), frameworks=_OF_LOOPS),
        Launcher(num_ranks=2, words=(*_ACCELERATE, "2", "--multi_gpu"), frameworks=_OF_LOOPS),
    ),
    "python": (
        Launcher(num_ranks=1),
        Launcher(num_ranks=2, frameworks=("lightning",)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one launch: ranks with records, exit code, and its lines."""

    num_recorded: int
    returncode: int
    log: str

    def row(self, num_ranks: int) -> tuple[str, ...]:
        """Return the last four columns."""
        lines = [line for line in self.log.splitlines() if line.startswith("[forerun]")]
        has_end = any(re.match(r"\[forerun\] end(s|ed) ", line) for line in lines)
        has_layouts = any(
            re.match(r"\[forerun\] (next time )?(perhaps )?faster", line) for line in lines
        )
        why = next((line for line in lines if _WHY.match(line)), "")
        if self.returncode:
            errors = [line for line in self.log.splitlines() if re.match(r"\S*Error\b", line)]
            why = f"training failed: {next(reversed(errors), 'no message')[:90]}"
        is_complete = self.num_recorded == num_ranks and has_end and has_layouts
        attached = "yes" if self.num_recorded == num_ranks else f"{self.num_recorded} ranks"
        line = "" if is_complete and not self.returncode else why.removeprefix("[forerun] ")
        return attached, _yes(has_end), _yes(has_layouts), line.replace("|", "/")[:170]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def program_words(framework: str, model: str, steps: int, clone: Path | None) -> list[str]:
    """Return the program and its arguments, with our flags."""
    if framework == "megatron":
        arguments = [*MODEL, *(_EXPERTS if model == "experts" else ()), "--train-iters", str(steps)]
        words = [str((clone or Path()) / "pretrain_gpt.py"), *arguments, "--calibrate-device=cpu"]
    else:
        options = ["--experts"] if model == "experts" else []
        words = [str(PROGRAM), framework, *options, "--steps", str(steps)]
        if framework not in ("trainer", "lightning"):
            words.append(f"--calibrate-total-steps={steps}")
    off = ["--calibrate-wandb=off", "--calibrate-tensorboard=off"]
    return [*words, "--calibrate", "--calibrate-steps=8", *off]


def run_cell(launcher: Launcher, words: Sequence[str], folder: Path) -> Outcome:
    """Start all processes of a launch, wait for them, and read what they left."""
    command = [sys.executable, *launcher.words, *words, f"--calibrate-dir={folder / 'cal'}"]
    num_processes, port = launcher.num_ranks if launcher.variables else 1, free_port()
    log = folder / "log"
    with log.open("w") as file:
        # Megatron reads torch's variables alone: users of srun and mpirun map them in front of it.
        is_mapped = bool(launcher.variables) and words[0].endswith("pretrain_gpt.py")
        environments = [
            _environment(launcher, rank, port, is_mapped=is_mapped) for rank in range(num_processes)
        ]
        processes = [
            subprocess.Popen(command, cwd=folder, env=one, stdout=file, stderr=subprocess.STDOUT)
            for one in environments
        ]
        codes = [_wait(process) for process in processes]
    recorded = [*(folder / "cal").glob("records/*/rank-*.jsonl")]
    # On a loaded machine the companion's time may be over before its first answer.
    report = [sys.executable, "-m", "forerun", "report", str(folder / "cal")]
    answer = subprocess.run(report, capture_output=True, text=True, check=False)
    text = log.read_text(errors="replace") + answer.stdout
    return Outcome(num_recorded=len(recorded), returncode=max(map(abs, codes)), log=text)


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _environment(launcher: Launcher, rank: int, port: str, *, is_mapped: bool) -> dict[str, str]:
    starts = ("FORERUN", "SLURM", "OMPI", "PMI", "MASTER", "WANDB", "TORCHELASTIC")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(starts)}
    values = {"n": launcher.num_ranks, "r": rank}
    stated = {name: text.format(**values) for name, text in (launcher.variables or {}).items()}
    shared = {
        "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "LAUNCHED_RANKS": str(launcher.num_ranks),
    }  # fmt: skip
    if is_mapped:
        shared |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(launcher.num_ranks),
            "LOCAL_RANK": str(rank),
        }
    return {**clean, **shared, **stated}


def free_port() -> str:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def main() -> None:
    """Run the cells that are asked for, and print them as a Markdown table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clone", type=Path)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    print(markdown_head(COLUMNS), flush=True)
    for name in args.launchers:
        for launcher in LAUNCHERS[name]:
            for framework in launcher.frameworks:
                for model in args.models:
                    if framework in args.frameworks and _is_there(framework, args.clone):
                        words = program_words(framework, model, args.steps, args.clone)
                        with tempfile.TemporaryDirectory() as folder:
                            outcome = run_cell(launcher, words, Path(folder))
                        cell = (name, str(launcher.num_ranks), framework, model)
                        print(markdown_row((*cell, *outcome.row(launcher.num_ranks))), flush=True)


def _is_there(framework: str, clone: Path | None) -> bool:
    if framework == "megatron":
        return clone is not None
    return framework != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


if __name__ == "__main__":
    main()
