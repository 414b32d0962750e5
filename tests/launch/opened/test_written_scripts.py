"""Written scripts are executed with programs that only record how they were started.

The truth is the launch of the user, executed in the same way: what the layout decides is compared
with the layout that was promised, everything else with that launch.
"""

from __future__ import annotations

import random
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from forerun.calib.advice.planning import Plan
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import RunConfig
from forerun.launch.opened.row_command import row_command
from forerun.launch.opened.run import unmeasured

MODEL = {
    **{"--num-layers": "4", "--hidden-size": "512", "--num-attention-heads": "4"},
    **{"--seq-length": "1024", "--max-position-embeddings": "1024", "--vocab-size": "32000"},
}
DECIDED = {
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"),
    *("--context-parallel-size", "--micro-batch-size", "--global-batch-size", "--train-iters"),
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--num-layers-per-virtual-pipeline-stage"),
    *("--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"),
}
STUB = """#!/bin/sh
name="${0##*/}"
[ "$name" = scontrol ] && printf 'head1\\nhead2\\n' && exit
[ "$name" = module ] && exit
{ printf '%s\\0' "$name" "$@"; printf '\\001\\0'; env -0; printf '\\002\\0'; } >> "$RECORDS"
case "$name" in srun | mpirun) ;; *) exit ;; esac
while case "$1" in -*) ;; *) false ;; esac; do
  case "$1" in TAKES) shift ;; esac
  shift
done
SLURM_PROCID=0 exec "$@"
"""
TAKES = "--cpus-per-task | -N | -n | -c | --mpi | -np | --nodes | --wait"
PROGRAMS = ("torchrun", "srun", "mpirun", "accelerate", "deepspeed", "python", "scontrol", "module")
VALUES = ("1", "two words", "it's", 'a"b', "$HOME/x", "a*b", "x;y", "back\\slash", "mlx5_0,mlx5_1")
OFFENDING = ("$(hostname)", "$SEED", "$HOME/x", "mpirun", "accelerate", "deepspeed")
"""Words that a script cannot be written for, or not for another number of ranks."""
SLURM = {
    **{"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "head1", "SLURM_JOB_NODELIST": "head[1-2]"},
    "CKPT": "/ckpt/run",
}


@dataclass(frozen=True)
class Case:
    """A drawn launch: the words after ``--``, or the text of a script."""

    words: tuple[str, ...]
    text: str
    runner: str
    """``bash`` or ``sbatch`` in front of the script; empty for a line."""
    verb: str
    num_ranks: int
    layout: tuple[str, ...]
    directives: tuple[str, ...] = ()


@dataclass
class Started:
    """The last program that a launch started, and those in front of it."""

    records: list[tuple[str, list[str], dict[str, str]]] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        return self.records[-1][1]

    @property
    def program(self) -> list[str]:
        """The training script and its arguments."""
        place = next(n for n, word in enumerate(self.argv) if word.endswith(".py"))
        return self.argv[place:]

    @property
    def num_ranks(self) -> int:
        """The ranks that the words of the launchers say."""
        found: dict[str, dict[str, str]] = {name: options(argv) for name, argv, _ in self.records}
        if "torchrun" in found or "-m" in self.argv:
            stated = options(self.argv)
            nodes = int(stated.get("--nnodes", "1"))
            if tasks := found.get("srun"):
                assert int(tasks.get("--nodes", tasks.get("-N", nodes))) == nodes
                assert int(tasks.get("--ntasks-per-node", "1")) == 1
            return nodes * int(stated["--nproc-per-node"])
        if "accelerate" in found:
            return int(found["accelerate"]["--num-processes"])
        if "deepspeed" in found:
            return int(found["deepspeed"]["--num-gpus"])
        if "mpirun" in found:
            return int(found["mpirun"]["-np"])
        if "srun" in found:
            stated = found["srun"]
            nodes = int(stated.get("--nodes", stated.get("-N", "1")))
            return nodes * int(stated.get("--ntasks-per-node", "1"))
        return 1


def options(argv: Sequence[str]) -> dict[str, str]:
    """Return the options in front of the training script, by their usual spelling."""
    out: dict[str, str] = {}
    for word, after in zip(argv, (*argv[1:], ""), strict=True):
        if word.endswith(".py"):
            break
        name, joined, value = word.partition("=")
        if word.startswith("-"):
            out[name.replace("_", "-")] = value if joined else after
    return out


def settings(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return a program's options with their words."""
    out: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words[1:]:
        if word.startswith("--"):
            name, joined, value = word.partition("=")
            out[name] = (value,) if joined else ()
        else:
            out[name] = (*out.get(name, ()), word)
    return out


def drawn(rng: random.Random) -> Case:
    """Return a launch by a launcher, with variables, quoting and a layout."""
    nodes, each = rng.choice((1, 2, 4)), rng.choice((4, 8))
    tp, pp = rng.choice(((1, 1), (2, 1), (1, 2), (2, 2)))
    ranks = nodes * each
    program = ["pretrain_gpt.py", "--bf16", *(w for pair in MODEL.items() for w in pair)]
    program += ["--micro-batch-size", "1", "--global-batch-size", "128"]
    program += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    program += ["--use-distributed-optimizer"] * rng.randrange(2)
    program += ["--train-iters", "500"]
    program += ["--save", rng.choice(VALUES), f"--wandb-exp-name={rng.choice(VALUES)}"]
    front = {
        name: rng.choice(VALUES)
        for name in (
            "NCCL_IB_HCA",
            "NCCL_SOCKET_IFNAME",
            "WANDB_NOTES",
            "CUDA_DEVICE_MAX_CONNECTIONS",
        )
        if rng.random() < 0.4
    }
    if "CUDA_DEVICE_MAX_CONNECTIONS" in front:
        front["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    launchers = {
        "torchrun": ["torchrun", "--nproc-per-node", str(each), f"--nnodes={nodes}"],
        "module": [
            "python",
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={each}",
            "--nnodes",
            str(nodes),
        ],
        "srun torchrun": [
            "srun",
            "--mpi",
            "pmix",
            "torchrun",
            "--nproc-per-node",
            str(each),
            "--nnodes",
            str(nodes),
        ],
        "srun": [
            "srun",
            "-N",
            str(nodes),
            f"--ntasks-per-node={each}",
            "--container-image=/i m",
            "python",
        ],
        "mpirun": ["mpirun", "-np", str(ranks), "python"],
        "accelerate": [
            "accelerate",
            "launch",
            "--num_processes",
            str(ranks),
            "--num_machines",
            str(nodes),
        ],
        "deepspeed": ["deepspeed", "--num_gpus", str(each)]
        if nodes == 1
        else ["mpirun", "-np", str(ranks), "python", "-u"],
    }
    kind = rng.choice([*launchers, "torchrun", "srun torchrun", "srun torchrun"])
    start = launchers[kind]
    if "torchrun" in kind or kind == "module":
        meeting = rng.choice(
            (
                [],
                ["--rdzv-backend", "c10d", "--rdzv-endpoint", "h9:29500"],
                ["--master-addr", "h9", "--node-rank", "0"],
            )
        )
        start = [*start, *(meeting if nodes > 1 else rng.choice(([], ["--standalone"])))]
    target = ranks if rng.random() < 0.5 else rng.choice((1, 2, 4)) * each
    choices = {"tp": (1, 2, 4 // pp), "mbs": (1, 2), "zero": (0, 1)}
    layout = [
        word
        for name, values in choices.items()
        for word in ((f"--{name}", str(rng.choice(values))) if rng.random() < 0.5 else ())
    ]
    verb = rng.choice(("write", "write", "sbatch"))
    runner = rng.choice(("", "", "bash", "sbatch", "sbatch"))
    if kind in OFFENDING and rng.random() < 0.7:
        verb = "write"
    if runner and rng.random() < 0.7:
        program = [word.replace("$HOME", "home") for word in program]
    case = Case(words=(), text="", runner=runner, verb=verb, num_ranks=target, layout=tuple(layout))
    if not runner:
        words = [*(["env"] * rng.randrange(2)), *(f"{n}={v}" for n, v in front.items())]
        return Case(**{**vars(case), "words": (*words, *start, *program)})
    return as_script(case, rng, start, program, front, nodes, each, kind)


def as_script(
    case: Case,
    rng: random.Random,
    start: list[str],
    program: list[str],
    front: Mapping[str, str],
    nodes: int,
    each: int,
    kind: str,
) -> Case:
    """Return the launch within a script of the usual form."""
    tasks = each if kind in ("srun", "mpirun") else 1
    directives = ["--partition=gpu", "--account=proj-1", "--qos=high", "--output=logs/%j.out"]
    directives += ["--time=24:00:00"] * rng.randrange(2) + ["--exclusive"] * rng.randrange(2)
    numbers = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    numbers += [rng.choice((f"--gpus-per-node={each}", f"--gres=gpu:h100:{each}"))]
    numbers += [f"--cpus-per-task={rng.choice((16, 96))}"] * rng.randrange(2)
    lines = ["#!/bin/bash"]
    if case.runner == "sbatch":
        lines += [
            f"#SBATCH {one}"
            for one in rng.sample([*directives, *numbers], len(directives) + len(numbers))
        ]
    lines += ["# don't forget the modules", "module load cuda", "export OMP_NUM_THREADS=8"]
    exported = {name: value for name, value in front.items() if rng.random() < 0.5}
    inline = {name: value for name, value in front.items() if name not in exported}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    words = [shlex.quote(word) for word in (*start, *program)]
    if rng.random() < 0.6 and "torchrun" in start and nodes > 1 and "--node-rank" not in start:
        lines.append('MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        words[words.index("torchrun") + 1 : words.index("torchrun") + 1] = [
            "--rdzv-endpoint",
            "$MASTER:29500",
        ]
        for name in ("h9:29500",):
            if name in words:
                place = words.index(name)
                del words[place - 1 : place + 1]
    words += rng.choice(
        (
            [],
            ["--load", '"$CKPT"'],
            ["--load", "$CKPT"],
            ["--load", "$CKPT/a"],
            ["--load", "${CKPT}"],
            ["--load", '"a $CKPT"'],
            *([[]] * 4),
            ["--tensorboard-dir", "$(hostname)"],
            ["--seed", "'$SEED'"],
        )
    )
    if rng.random() < 0.3:
        lines.append(f"ARGS=({' '.join(words[len(start) + 1 :])})")
        place = words.index("pretrain_gpt.py") + 1
        lines[-1] = f"ARGS=({' '.join(words[place:])})"
        words[place:] = ['"${ARGS[@]}"']
    text = " ".join((*(f"{n}={shlex.quote(v)}" for n, v in inline.items()), *words))
    text = rng.choice(
        (text, text.replace(" --", " \\\n    --"), f"exec {text}" if not inline else text)
    )
    lines += rng.choice(
        (
            [text],
            [text + " > log.txt 2>&1"],
            [text + " 2>&1 | tee log.txt", "echo done"],
            [f"if true; then {text}; fi"],
        )
    )
    stays = tuple(f"#SBATCH {one}" for one in directives if case.runner == "sbatch")
    return Case(**{**vars(case), "text": "\n".join(lines) + "\n", "directives": stays})


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that record their words and variables."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        path = folder / name
        path.write_text(STUB.replace("TAKES", TAKES))
        path.chmod(0o700)
    return folder


def execute(path: Path, programs: Path, arguments: Sequence[str] = ()) -> Started:
    """Run a script as Slurm would, or a shell without directives."""
    text, records = path.read_text(), programs.parent / "records"
    records.unlink(missing_ok=True)
    given = dict(re.findall(r"^#SBATCH --([\w-]+)[= ](\S+)", text, re.MULTILINE))
    variables = {**SLURM, "MASTER_ADDR": "head1", "NODE_RANK": "0"}
    if given:
        variables["SLURM_JOB_NUM_NODES"] = variables["SLURM_NNODES"] = given["nodes"]
        variables["SLURM_CPUS_PER_TASK"] = given.get("cpus-per-task", "1")
    variables |= {"PATH": f"{programs}:/usr/bin:/bin", "RECORDS": str(records), "HOME": "/home/u"}
    done = subprocess.run(
        ["bash", str(path), *arguments],
        cwd=path.parent,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + text
    started = Started()
    for record in records.read_text().split("\2\0")[:-1]:
        words, _, environment = record.partition("\1\0")
        name, *argv = words.split("\0")[:-1]
        pairs = (one.partition("=") for one in environment.split("\0"))
        started.records.append((name, argv, {key: value for key, _, value in pairs}))
    return started


@cache
def _any_plan() -> Plan:
    words = ("torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--bf16")
    sizes = (word for pair in MODEL.items() for word in pair)
    batch = ("--micro-batch-size", "1", "--global-batch-size", "8")
    return unmeasured("H100", command=(*words, *sizes, *batch)).plan(top=1).chosen.plan


def promised(case: Case, path: Path, target: Path) -> RunConfig:
    """Write the script of a case; return the layout that was promised."""
    run = unmeasured("H100", command=(case.runner, str(path)) if case.runner else case.words)
    prediction = run.predict(case.layout, gpus=case.num_ranks)
    if case.verb == "sbatch":
        prediction.write_sbatch(target)
        return prediction.layout.config
    rows = {"running": run.predict().layout, "candidates": (prediction.layout,)}
    plan = replace(_any_plan(), **rows)
    running = rows["running"].config
    row_command(path.parent, run.run_id, plan, 1, prediction.other, running).write(target)
    return prediction.layout.config


def check(case: Case, programs: Path, number: int) -> str:
    """Return ``run`` if the written script starts what was promised, ``refused`` if it says why it
    cannot be written."""
    folder = programs.parent
    stated, target = folder / "user.sh", folder / f"go{number}.sh"
    stated.write_text(case.text or f"exec env {shlex.join(case.words)}\n")
    try:
        config = promised(case, stated, target)
    except ConfigError as err:
        line = case.text or " ".join(case.words)
        assert any(word in str(err) for word in OFFENDING if word in line), err
        return "refused"
    text = target.read_text()
    before, after = execute(stated, programs), execute(target, programs)
    have, was = settings(after.program), settings(before.program)
    par = config.parallelism
    assert after.num_ranks == par.num_ranks
    wanted = {
        **{"--tensor-model-parallel-size": par.tp, "--pipeline-model-parallel-size": par.pp},
        "--micro-batch-size": config.batch.micro_batch_size,
        "--global-batch-size": config.batch.global_batch_size,
    }
    for name, value in wanted.items():
        assert have.get(name, ("1",)) == (str(value),), name
    added = {*re.findall(r"^# added: (\S+)", text, re.MULTILINE), *DECIDED}
    assert {n: v for n, v in have.items() if n in was or n not in added} == {
        n: have[n] if n in DECIDED and n in have else v
        for n, v in was.items()
        if n not in DECIDED or n in have
    }
    ignored = {"SLURM_PROCID", "CUDA_DEVICE_MAX_CONNECTIONS", "_", "SHLVL", "OLDPWD"}
    ignored |= {name for name in after.records[-1][2] if name.startswith(("SLURM_", "LINES"))}
    for name, value in before.records[-1][2].items():
        assert name in ignored or after.records[-1][2].get(name) == value, name
    if par.tp > 1:
        assert after.records[-1][2]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not re.search(r"SLURM_\w+=\d", text.partition("set -eu")[2])
    assert len([name for name, _, _ in after.records if name == "srun"]) <= 1
    given = dict(re.findall(r"^#SBATCH --([\w-]+)[= ](\S+)", text, re.MULTILINE))
    assert set(case.directives) <= set(text.splitlines())
    if given:
        assert "cpus-per-task" in given or case.verb == "write"
        each = int(re.sub(r".*:", "", given.get("gpus-per-node") or given.get("gres", "0")))
        nodes = int(given["nodes"])
        assert each in (0, par.num_ranks // nodes)
        assert int(given["ntasks-per-node"]) in (1, par.num_ranks // nodes)
    more = execute(target, programs, ["--calibrate"])
    assert more.program == [*after.program, "--calibrate"]
    reread = unmeasured("H100", command=("sbatch" if given else "bash", str(target)))
    assert (reread.described.parallelism.num_ranks, reread.described.batch) == (
        par.num_ranks,
        config.batch,
    )
    assert (reread.described.parallelism.tp, reread.described.parallelism.pp) == (par.tp, par.pp)
    return "run"


@pytest.mark.parametrize("seed", range(4))
def test_a_written_script_starts_what_was_promised(seed: int, programs: Path) -> None:
    rng = random.Random(seed)
    ends = [check(drawn(rng), programs, n) for n in range(10)]
    assert ends.count("run") >= 4


@pytest.mark.slow
def test_two_hundred_written_scripts(programs: Path) -> None:
    rng = random.Random(2026)
    ends = [check(drawn(rng), programs, n) for n in range(200)]
    assert ends.count("run") >= 120


LINE = " ".join(
    (
        "pretrain_gpt.py --bf16 --micro-batch-size 1 --global-batch-size 128 --train-iters 9",
        *(word for pair in MODEL.items() for word in pair),
    )
)
SRUN = f"srun torchrun --nproc-per-node 8 --nnodes $SLURM_NNODES {LINE}"
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"


def written(programs: Path, text: str, *command: str, gpus: int = 32) -> Path:
    """Write a script with the launch of another, on other nodes; return its path."""
    path, target = programs.parent / "user.sh", programs.parent / "go.sh"
    path.write_text(text)
    case = Case((), text, "", "write", gpus, ("--mbs", "2"))
    words = tuple(str(path) if word == "FILE" else word for word in command)
    promised(replace(case, words=words), path, target)
    return target


def test_what_sbatch_and_the_shell_were_given_stays(programs: Path) -> None:
    text = HEAD + f'NODES=$1\nexport OUT="$2"\n{SRUN} --save "$OUT" --seed 7'
    command = ("A=x y", "sbatch", "-p", "big", "--mem=0", "FILE", "2", "a b")
    path = written(programs, text, *command)
    assert "#SBATCH -p big --mem=0\n" in path.read_text()
    started = execute(path, programs, ["--calibrate"])
    assert started.program[-1] == "--calibrate" and started.num_ranks == 32
    assert settings(started.program)["--save"] == ("a b",)
    assert started.records[-1][2]["A"] == "x y" and started.records[-1][2]["OUT"] == "a b"


PUBLIC = """#!/bin/bash
#SBATCH --account=acct
#SBATCH --time=5:00:00
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=288
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK/SLURM_GPUS_PER_NODE))
MASTER_PORT=$(echo 29500)
TORCHRUN_ARGS=(
    --nproc-per-node $SLURM_GPUS_PER_NODE
\t--nnodes $SLURM_NNODES
\t--rdzv_endpoint $MASTER_ADDR:$MASTER_PORT
)
CMD_PREFIX="env A=1"
TRAINING_CMD="torchrun ${TORCHRUN_ARGS[@]} $CKPT/LINE"
srun -lu --cpus-per-task $SLURM_CPUS_PER_TASK --wait 60 bash -c "$CMD_PREFIX $TRAINING_CMD"
"""


def test_a_public_script_is_written_with_its_nodes(programs: Path) -> None:
    """The form of swiss-ai's submissions: ``bash -c`` behind ``srun``, an address from outside."""
    path = written(programs, PUBLIC.replace("LINE", LINE), "sbatch", "FILE", gpus=64)
    lines = path.read_text().splitlines()
    assert {*PUBLIC.splitlines()[1:3], "#SBATCH --nodes=16", "#SBATCH --cpus-per-task=288"} <= {
        *lines
    }
    path.write_text(path.read_text().replace("SLURM_GPUS_PER_NODE))", "SLURM_NNODES))"))
    started = execute(path, programs)
    assert started.num_ranks == 64 and started.program[0] == "/ckpt/run/pretrain_gpt.py"
    assert options(started.argv)["--rdzv-endpoint"] == "head1:29500"
    assert started.records[-1][2]["A"] == "1"


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [
        (f"f() {{\n{SRUN}\n}}\nf\n", (), "at no single place"),
        (f"{SRUN}\n{SRUN}\n", (), "at no single place"),
        (f"bash -c 'export A=1; {SRUN}'\n", (), "at no single place"),
        (f"{SRUN} --save $1\n", (), "takes arguments"),
        (f"{SRUN} --seed $SLURM_PROCID\n", (), "SLURM_PROCID"),
        (f"ARGS='--save $OUT'\n{SRUN} $ARGS\n", (), "$OUT"),
        (f'export OUT\nARGS="--save $OUT"\n{SRUN} $ARGS\n', (), "$OUT"),
        (SRUN, ("docker", "run", "img", "bash", "FILE"), "give the inner one alone"),
    ],
)
def test_what_cannot_be_written_is_named(
    text: str, command: tuple[str, ...], message: str, programs: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        written(programs, HEAD + text, *(command or ("sbatch", "FILE")))
    assert not (programs.parent / "go.sh").exists()


def test_flags_of_a_launch_stay_in_its_script(programs: Path) -> None:
    text = f"torchrun --standalone --nproc-per-node 8 {LINE} --calibrate --calibrate-dir=x"
    started = execute(written(programs, text, "bash", "FILE", gpus=8), programs, ["--seed=7"])
    assert {"--calibrate", "--calibrate-dir=x"} <= {*started.program}
    assert started.program[-1] == "--seed=7"


def test_a_script_that_reads_files_beside_itself_stays_there(programs: Path) -> None:
    (programs.parent / "other").mkdir()
    run = unmeasured(
        "H100", command=("bash", "-c", f"cd $(dirname $0)\ntorchrun --nproc-per-node 8 {LINE}")
    )
    with pytest.raises(ConfigError, match="reads files beside itself"):
        run.predict(gpus=8).write_sbatch(programs.parent / "other" / "go.sh")
