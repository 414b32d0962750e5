"""Real runs of the recipe for ``gpu/recipe_runs.py``: sizes, commands, and results."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forerun.benchmarks.runs.launches import step_times_s, torchrun_words
from forerun.calib.records import RunRecords
from forerun.calib.samples import SampleTable, build_table, read_run

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "pretrain_gpt.py"
WARMUP_STEPS = 3
_BITS = re.compile(r"loss bits (0x[0-9a-f]{8})")
_TAIL = 1500


class RunFailed(Exception):
    """A training run failed; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the runs: options of the recipe, and numbers of steps."""

    model: tuple[str, ...]
    layers: int
    seq_length: int
    micro_batch: int
    overhead_steps: int
    window_steps: int
    steps_after: int
    timeout_s: float

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the shape that everything is calibrated on."""
        return (
            *self.model,
            *("--num-layers", str(self.layers), "--seq-length", str(self.seq_length)),
            *("--micro-batch-size", str(self.micro_batch)),
            *("--global-batch-size", str(8 * self.micro_batch), "--mock-data"),
        )


GPU = Size(
    model=(
        *("--hidden-size", "2048", "--num-attention-heads", "16", "--vocab-size", "50304"),
        *("--bf16", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
        *("--position-embedding-type", "rope"),
    ),
    layers=8,
    seq_length=2048,
    micro_batch=2,
    overhead_steps=200,
    window_steps=20,
    steps_after=20,
    timeout_s=3600.0,
)
"""505 million parameters: half a second per step on an H200, which is lent for minutes."""
CPU = Size(
    model=("--hidden-size", "32", "--num-attention-heads", "2"),
    layers=2,
    seq_length=32,
    micro_batch=1,
    overhead_steps=8,
    window_steps=8,
    steps_after=6,
    timeout_s=120.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: steps in seconds from its log, and the bits of its losses."""

    directory: Path
    steps_s: tuple[float, ...]
    loss_bits: tuple[str, ...]
    window_steps: int

    @property
    def after_s(self) -> tuple[float, ...]:
        """Steps after the window, without the one that closes it."""
        return self.steps_s[WARMUP_STEPS + self.window_steps + 2 :]

    @property
    def step_s(self) -> float:
        """Median of the steps after the window."""
        return statistics.median(self.after_s)

    @property
    def records(self) -> RunRecords:
        """Records of the hooks."""
        return read_run(self.directory)

    @property
    def table(self) -> SampleTable:
        """Samples of the run."""
        return build_table(self.records)


@dataclass(slots=True, kw_only=True)
class Runner:
    """Starts runs one after another in a directory; equal runs are made once."""

    out: Path
    size: Size
    is_cpu: bool
    known: dict[str, Run] = field(default_factory=dict)

    def run(
        self,
        name: str,
        options: tuple[str, ...] = (),
        *,
        num_ranks: int = 1,
        window_steps: int | None = None,
        trace: str = "off",
        environ: Mapping[str, str] | None = None,
        is_bare: bool = False,
    ) -> Run:
        """Train with a calibrated window of ``window_steps`` (none if 0 or ``is_bare``)."""
        if name not in self.known:
            steps = self.size.window_steps if window_steps is None else window_steps
            flags: tuple[str, ...] = ()
            if steps and not is_bare:
                directory = self._directory(name)
                flags = ("--calibrate", f"--calibrate-steps={steps}", f"--calibrate-trace={trace}")
                flags += (f"--calibrate-dir={directory}", "--calibrate-wandb=off")
            self.known[name] = self._train(name, options, num_ranks, steps, flags, environ or {})
        return self.known[name]

    def _directory(self, name: str) -> Path:
        return self.out / "runs" / re.sub(r"[^A-Za-z0-9]+", "-", name)

    def fake(self, name: str, options: tuple[str, ...], rank: int, num_ranks: int) -> Run:
        """Run one process as rank ``rank`` of ``num_ranks``, in Megatron's fake process group."""
        place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        environ = {key: str(value) for key, value in place.items()}
        environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29631"}
        return self.run(name, (*options, "--fake-process-group"), num_ranks=0, environ=environ)

    def _train(
        self,
        name: str,
        options: tuple[str, ...],
        num_ranks: int,
        window_steps: int,
        flags: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> Run:
        directory = self._directory(name)
        # Run the same number of steps with and without flags: data and learning rate depend on it.
        iters = WARMUP_STEPS + window_steps + 2 + self.size.steps_after
        launcher = [sys.executable]
        if num_ranks:
            # A machine without network may not resolve its own name.
            launcher = [*torchrun_words(num_ranks), "--local-addr", "localhost"]
        command = [*launcher, str(RECIPE), *self.size.options, *options]
        command += ["--train-iters", str(iters), "--log-interval", "1", *flags]
        settings = {**os.environ, **environ}
        if self.is_cpu:
            settings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        print(f"{name}: {' '.join(command[len(launcher) :])}", file=sys.stderr, flush=True)
        done = self._finished(command, settings)
        return Run(
            directory=directory,
            steps_s=tuple(step_times_s(done)),
            loss_bits=tuple(_BITS.findall(done)),
            window_steps=window_steps,
        )

    def _finished(self, command: list[str], environ: Mapping[str, str]) -> str:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=dict(environ),
                timeout=self.size.timeout_s,
            )
        except subprocess.TimeoutExpired as err:
            raise RunFailed(f"still running after {self.size.timeout_s:.0f} s") from err
        if done.returncode:
            raise RunFailed(f"ended with {done.returncode}: {done.stderr[-_TAIL:].strip()}")
        return done.stdout
