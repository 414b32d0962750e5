"""Share of installed hooks that fired, and of pass time inside operators, on unmodified programs.

    python benchmarks/coverage.py --out DIR [--megatron CHECKOUT] [--torchtitan CHECKOUT ...]
        [--only WORDS ...] [--only-table] [--json FILE]

Each row is one training of sixteen steps on CPU ranks over gloo, in a folder of ``DIR``:
Megatron-LM's ``pretrain_gpt.py`` (an exported tag with ``helpers_cpp`` built), FSDP2 with
``attach``, the Trainer of transformers, torchtitan's Trainer (a release of 0.2, or later; its
imports must be available).  Finished runs are not repeated.  ``--only`` selects rows whose name has
one of these words.

Hooks are those of all ranks.  A share is the time inside operators over that of the sampled passes,
excluding waits for transfers and our own time; ``layer's rest`` is time attributed to the residual
connections of a layer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.megatron_matrix import MODEL
from forerun.benchmarks.runs.launches import torchrun_words
from forerun.calib.records import CoverageRecord, OperatorRecord, PhaseRecord, RunRecords
from forerun.calib.samples import read_run
from forerun.calib.workload import OperatorKind, Phase

RUNS = Path(__file__).parent / "runs"
WINDOW, STEPS, LIMIT_S = 8, 16, 300.0
_ON_CPU = ("--calibrate-device=cpu",)
_PASSES = {
    Phase.FORWARD: "forward-compute",
    Phase.BACKWARD: "backward-compute",
    Phase.RECOMPUTE: "backward-compute",
}
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear "
    "--moe-token-dispatcher-type"
)
MEGATRON: Mapping[str, str] = {
    "DP2": "",
    "TP2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2, interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage "
    "1",
    "EP2, all-to-all": f"{_EXPERTS} alltoall",
    "EP2, all-gather": f"{_EXPERTS} allgather",
    "EP2, shared expert": f"{_EXPERTS} alltoall --moe-shared-expert-intermediate-size 64",
    "EP2, shared expert overlapped": f"{_EXPERTS} alltoall --moe-shared-expert-intermediate-size "
    "64 --moe-shared-expert-overlap",
    "EP2, combined 1F1B": f"{_EXPERTS} alltoall --overlap-moe-expert-parallel-comm --bf16",
    "EP2, combined 1F1B, delayed": f"{_EXPERTS} alltoall --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute --bf16",
    "full recompute": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective",
}
FSDP2 = (
    *("llama-sdpa", "llama-eager", "llama-recompute", "llama-wrapped", "llama-compiled"),
    *("llama-flex", "gpt2", "qwen3-moe", "plain"),
)
TRAINER = ("llama-sdpa", "llama-eager", "llama-recompute", "gpt2", "qwen3-moe")
TITAN: Mapping[str, tuple[str, str]] = {
    "dense, FSDP2": ("llama3", ""),
    "dense, TP2": ("llama3", "--parallelism.tensor_parallel_degree=2"),
    "dense, full recompute": ("llama3", "checkpoint"),
    "MoE, FSDP2": ("deepseek_v3", ""),
    "MoE, EP2": ("deepseek_v3", "--parallelism.expert_parallel_degree=2"),
}
"""Model and options of each row; ``checkpoint`` is activation checkpointing of whole layers.

Compiled layers are in the FSDP2 rows: nothing is compiled under a CPU stand-in for CUDA.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch."""

    client: str
    layout: str
    words: tuple[str, ...]
    """The program and its arguments, after ``torchrun``."""
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name used by ``--only`` and for folders of runs."""
        return f"{self.client} {self.layout}".replace(", ", "-").replace(" ", "-").lower()


@dataclass(slots=True, kw_only=True)
class Row:
    """Figures of one launch; empty except for ``problem`` if it failed."""

    client: str
    layout: str
    installed: dict[str, int] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    """Share of time in operators, by the name of the pass; ``residual`` is over both passes."""
    remarks: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def silent(self) -> Iterator[str]:
        """Yield the kinds of hooks that did not all fire."""
        for name, count in self.installed.items():
            if self.fired[name] < count:
                yield f"{name} {self.fired[name]}/{count}"


def cases(megatron: Path | None, titans: list[Path]) -> Iterator[Case]:
    """Yield all cases of the available programs."""
    for layout, options in MEGATRON.items() if megatron is not None else ():
        words = ("pretrain_gpt.py", *MODEL, "--train-iters", str(STEPS), *options.split())
        environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        folder = megatron or Path()
        yield Case(client="Megatron-LM", layout=layout, words=(*words, *_ON_CPU), folder=folder,
            environ=environ)  # fmt: skip
    for client, loop, names in (("FSDP2", "fsdp2", FSDP2), ("Trainer", "trainer", TRAINER)):
        for name in names:
            words = (str(RUNS / "coverage_loop.py"), loop, name, "{out}")
            yield Case(client=client, layout=name, words=words, folder=RUNS)
    for checkout in titans:
        is_later = (checkout / "torchtitan" / "trainer.py").exists()
        for layout, (model, options) in TITAN.items():
            words = (_later if is_later else _of_0_2)(model, options)
            client = "torchtitan main" if is_later else "torchtitan 0.2"
            paths = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
            environ = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
            script = str(RUNS / "titan_run.py")
            yield Case(client=client, layout=layout, words=(script, *words, *_ON_CPU),
                folder=checkout, environ=environ)  # fmt: skip


def _of_0_2(model: str, options: str) -> tuple[str, ...]:
    """Return arguments for a release that reads TOML: its debug model, with 128 tokens per rank."""
    recompute = "full" if options == "checkpoint" else "none"
    more = () if options == "checkpoint" else tuple(options.split())
    settings = f"torchtitan/models/{model}/train_configs/debug_model.toml"
    return (
        *("--job.config_file", settings, "--job.dump_folder", "{out}/dump"),
        *("--training.steps", str(STEPS), "--training.local_batch_size", "2"),
        *("--training.seq_len", "64", "--training.mixed_precision_param", "float32"),
        *("--training.dataset", "c4_test", "--training.dataset_path", "{data}"),
        *("--activation_checkpoint.mode", recompute, *more),
    )


def _later(model: str, options: str) -> tuple[str, ...]:
    """Return arguments for later releases, which have a registry of configurations."""
    recompute = "full" if options == "checkpoint" else "selective"
    more = () if options == "checkpoint" else tuple(options.split())
    return (
        *("--module", model, "--config", f"{model}_debugmodel", "--dump_folder", "{out}/dump"),
        *("--training.steps", str(STEPS), "--training.max_context_length", "64"),
        *("--training.num_tokens_per_microbatch_per_dp_rank", "128"),
        *("--training.disable_cuda_graphs", "--training.mixed_precision_param", "float32"),
        *("--parallelism.spmd_backend", "partial_dtensor", *more),
        f"activation-checkpoint:{recompute}",
    )


def text_in(folder: Path) -> Path:
    """Write a dataset of random words as JSON lines into a folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["token", "model", "layer", "step", "rank", "group", "time", "loss", "batch", "queue"]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=400))}) for _ in range(400)]
    (folder / "data.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def train(case: Case, out: Path, data: Path) -> None:
    """Run a case into an empty folder with output in ``log.txt``; ``ended`` marks a clean end."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    places = {"out": str(out), "data": str(data)}
    words = [word.format(**places) if word.startswith("{") else word for word in case.words]
    forerun_options = ["--calibrate", f"--calibrate-dir={out}", f"--calibrate-steps={WINDOW}"]
    forerun_options = [] if case.client == "FSDP2" else [*forerun_options, "--calibrate-wandb=off"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PATH": first, **case.environ}
    if "torchtitan main" in case.client:
        shutil.copytree(data, case.folder / "tests/assets/c4_test", dirs_exist_ok=True)
    with (out / "log.txt").open("w") as log:
        done = subprocess.run(
            [*torchrun_words(), *words, *forerun_options],
            cwd=case.folder, env=clean, stdout=log, stderr=log, check=False, timeout=LIMIT_S,
        )  # fmt: skip
    (out / "ended").write_text(str(done.returncode), encoding="utf-8")


def row_of(case: Case, out: Path) -> Row:
    """Return the figures from a case's records, or why it failed."""
    row = Row(client=case.client, layout=case.layout)
    if (out / "ended").read_text(encoding="utf-8") != "0":
        row.problem = _problem((out / "log.txt").read_text(encoding="utf-8"))
        return row
    run = read_run(out)
    installed, fired, remarks = Counter[str](), Counter[str](), set[str]()
    for records in run.records.values():
        for one in records:
            if isinstance(one, CoverageRecord) and one.installed:
                installed[one.name] += one.installed
                fired[one.name] += min(one.installed, one.fired)
            elif isinstance(one, CoverageRecord):
                remarks.add(one.name)
    row.installed, row.fired = dict(installed), {name: fired[name] for name in installed}
    row.remarks, row.shares = sorted(remarks), shares_of(run)
    return row


def _problem(log: str) -> str:
    """Return the last error of the program itself."""
    lines = [line.strip() for line in log.splitlines()]
    errors = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
    return errors[-1].partition("]: ")[2] or errors[-1] if errors else "ended without a message"


def shares_of(run: RunRecords) -> dict[str, float]:
    """Return time in operators over that of the passes they run in, by the name of the pass."""
    spent, passed = Counter[str](), Counter[str]()
    for records in run.records.values():
        passes = {
            (one.step, one.microbatch, one.name): one
            for one in records
            if isinstance(one, PhaseRecord) and one.name in _PASSES.values()
        }
        sampled = set[tuple[int, int, str]]()
        for one in records:
            key = _pass_of(one)
            if key is None or not _is_inside(one, passes.get(key)):
                continue
            sampled.add(key)
            spent[key[2]] += one.duration_ns
            spent["residual"] += one.duration_ns * (one.kind is OperatorKind.RESIDUAL)
        for key in sampled:
            around = passes[key]
            passed[key[2]] += around.duration_ns - around.wait_ns - around.hook_ns
    passed["residual"] = sum(passed.values())
    return {name: spent[name] / passed[name] for name in passed if passed[name]}


def _pass_of(record: Any) -> tuple[int, int, str] | None:
    if not isinstance(record, OperatorRecord) or record.phase not in _PASSES:
        return None
    return record.step, record.microbatch, _PASSES[record.phase]


def _is_inside(operator: Any, around: PhaseRecord | None) -> bool:
    """Return False for calls between passes, such as torchtitan's loss calling the last layer."""
    if around is None:
        return False
    return 0 <= operator.start_ns - around.start_ns <= around.duration_ns


def table(rows: list[Row]) -> str:
    """Return a table with one line for each launch."""
    head = ("client", "layout", "hooks fired", "share", "forward", "backward", "layer's rest")
    lines = []
    for row in rows:
        if row.problem:
            lines.append([row.client, row.layout, "not run", *[""] * 4, row.problem])
            continue
        fired, installed = sum(row.fired.values()), sum(row.installed.values())
        names = (*_PASSES.values(), "residual")
        shares = [
            f"{row.shares[name]:.0%}" if name in row.shares else "" for name in dict.fromkeys(names)
        ]
        remarks = "; ".join([*row.silent, *row.remarks])
        count = [f"{fired} of {installed}", f"{fired / installed:.0%}"]
        lines.append([row.client, row.layout, *count, *shares, remarks])
    return markdown_table((*head, "not fired, and what is said"), lines)


def kind_table(rows: list[Row]) -> str:
    """Return fired over installed by kind, forward plus backward, over the layouts of a client."""
    clients = list(dict.fromkeys(row.client for row in rows))
    installed, fired = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in rows:
        for name, count in row.installed.items():
            key = name.removesuffix(":backward"), row.client
            installed[key] += count
            fired[key] += row.fired[name]
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in installed):
        counts = [(fired[kind, client], installed[kind, client]) for client in clients]
        lines.append([kind, *(f"{some}/{all_of}" if all_of else "" for some, all_of in counts)])
    return markdown_table(("kind", *clients), lines)


def main() -> None:
    """Run missing cases, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--torchtitan", type=Path, nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data, rows = text_in(args.out.resolve() / "data"), []
    for case in cases(args.megatron, args.torchtitan):
        out = args.out.resolve() / case.name
        if not any(word in case.name for word in args.only):
            continue
        if not (out / "ended").exists():
            if args.only_table:
                continue
            train(case, out, data)
        rows.append(row_of(case, out))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows), kind_table(rows), sep="\n\n")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
