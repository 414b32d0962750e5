"""Measurements that only a GPU allows, on a bare machine: one GPU, an installed torch, no network.

    python benchmarks/gpu/collect.py --out DIR [--archive FILE] [--part 1|2] [--carry FOLDER]
                                     [--megatron CLONE] [--only NAME ...] [--cpu] [--stretch X]

Part 1 is the sweep (``sweep.py``), part 2 has two ranks on the GPU.  Each measurement runs in a
process of its own that ends at its time limit; a part of them takes nine minutes at most.  Figures
are written immediately, the archive contains all of them, and ``judge.py`` makes a page of that on
any machine.  Nothing is installed: Forerun is imported from this clone; wheels and ``*.tar.xz`` of
the carried folder are unpacked onto the path.
``--cpu`` rehearses with small models on a CPU; its times are meaningless.  Needs the standard
library alone.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.metadata
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
PART_S = 540.0
"""Time limit of a part in seconds: machines are lent for ten minutes per command."""
_TAIL = 20_000
"""Characters of a measurement's output that are stored."""
_ENDING_S = 3.0
_MARK = "GPU_REPORT_RUN"
"""A variable in the environment of all started processes: workers and companions have sessions of
their own."""


@dataclass(frozen=True)
class Measurement:
    """One measurement; they are listed by decreasing value."""

    name: str
    part: int
    limit_s: float


MEASUREMENTS = (
    Measurement("preflight", 1, 30.0),
    Measurement("base", 1, 90.0),
    Measurement("predictions", 1, 25.0),
    Measurement("sweep", 1, 160.0),
    Measurement("shards", 1, 70.0),
    Measurement("turns", 1, 65.0),
    Measurement("moe", 1, 60.0),
    Measurement("two_ranks", 2, 195.0),
)
_PACK_S = 15.0
_packing = threading.Lock()
_RESTART_S = 40.0
"""Seconds left of a limit for which a process that broke is started again."""


def main() -> int:
    """Measure, and pack the results; return 0 if each measurement ran to its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, choices=(1, 2), help="default: all")
    parser.add_argument("--archive", type=Path, help="default: DIR.tar.gz")
    parser.add_argument("--carry", type=Path, help="wheels and archives this machine has not")
    parser.add_argument("--megatron", type=Path, help="a clone of Megatron-LM, if not carried")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in MEASUREMENTS])
    parser.add_argument("--cpu", action="store_true", help="rehearse on a CPU with small models")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor of all limits (1)")
    args = parser.parse_args()
    chosen = [
        replace(each, limit_s=each.limit_s * args.stretch)
        for each in MEASUREMENTS
        if (args.part in (None, each.part)) and (not args.only or each.name in args.only)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    is_whole = True
    archive = args.archive or args.out.with_name(f"{args.out.name}.tar.gz")
    temporary = tempfile.TemporaryDirectory(prefix="forerun-gpu-")
    with temporary as folder, packed_often(args.out, archive):
        environ = environment(Path(folder), args.carry, args.megatron)
        environ |= {"OMP_NUM_THREADS": "1"} if args.cpu else {}
        begun_s, planned_s = time.monotonic(), 0.0
        for each in chosen:
            if each.name == "sweep":  # takes what those before it have not used
                spare_s = max(0.0, planned_s - (time.monotonic() - begun_s))
                each = replace(each, limit_s=each.limit_s + spare_s)
            planned_s += each.limit_s
            outcome = measure(each, args.out, Path(folder), environ, is_cpu=args.cpu)
            is_whole = is_whole and outcome["state"] in ("done", "not here")
            why = f": {outcome['why']}" if outcome.get("why") else ""
            print(f"{each.name}: {outcome['state']} in {outcome['wall_s']:.1f} s{why}", flush=True)
            pack(args.out, archive)
    return 0 if is_whole else 1


def environment(
    folder: Path, carried: Path | None = None, megatron: Path | None = None
) -> dict[str, str]:
    """Return variables under which this Python finds Forerun and what was carried."""
    path, more = folder / "path", {}
    path.mkdir()
    for place in sorted(carried.iterdir()) if carried else ():
        if place.suffix == ".whl":
            with ZipFile(place) as packed:
                packed.extractall(path)
        elif place.name.endswith(".tar.xz"):
            # Transformer Engine is apart: one that does not work breaks Megatron's imports.
            is_engine = place.name.startswith("te_site")
            with tarfile.open(place) as packed:
                packed.extractall(folder / "engine" if is_engine else path, filter="data")
            more |= {"GPU_REPORT_ENGINE": str(folder / "engine")} if is_engine else {}
        elif place.name == "nccl2.xz":
            library = folder / "libnccl.so.2"
            library.write_bytes(lzma.decompress(place.read_bytes()))
            more["GPU_REPORT_NCCL"] = str(library)
    if not _is_installed():
        _put_package(path)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    clone = str(megatron.resolve()) if megatron else ""
    known = [str(path), *filter(None, [clone, clean.get("PYTHONPATH")])]
    return clean | more | {"PYTHONPATH": os.pathsep.join(known), _MARK: folder.name}


def _is_installed() -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version("forerun"))
    return False


def _put_package(path: Path) -> None:
    """Put the package under its name, with the entry point that ``import torch`` looks for."""
    (path / "forerun").symlink_to(ROOT)
    (path / "_forerun_autoload.py").symlink_to(ROOT / "_forerun_autoload.py")
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [
        f"[{name}]\n{text.strip()}\n" for name, text in setup_cfg["options.entry_points"].items()
    ]
    home = path / "forerun-0.dist-info"
    home.mkdir()
    (home / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: forerun\nVersion: 0\n")


def measure(
    each: Measurement, out: Path, folder: Path, environ: dict[str, str], *, is_cpu: bool
) -> dict:
    """Run one measurement in its own process; return its figures up to the limit, and its end."""
    place, work = out / f"{each.name}.json", folder / each.name
    place.unlink(missing_ok=True)
    work.mkdir()
    script = Path(__file__).with_name("measure.py")
    command = [sys.executable, str(script), each.name, "--out", str(place), "--work", str(work)]
    command += ["--cpu"] if is_cpu else []
    environ = environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # as Megatron-LM is launched
    engine = environ.get("GPU_REPORT_ENGINE")
    if engine and (each.name == "preflight" or _figures(out, "preflight").get("has_engine")):
        environ["PYTHONPATH"] = os.pathsep.join([engine, environ["PYTHONPATH"]])
    begun_s, output, outcome, code = time.monotonic(), "", {}, -1
    while code and (remaining_s := each.limit_s - (time.monotonic() - begun_s)) > 0:
        code, more = finished(
            [*command, "--limit", str(remaining_s - _ENDING_S)], environ, remaining_s
        )
        output += more
        (out / f"{each.name}.log").write_text(output[-_TAIL:], encoding="utf-8")
        outcome = {"schema": 1, "state": "failed", "figures": {}}
        with suppress(OSError, ValueError):
            outcome |= json.loads(place.read_text(encoding="utf-8"))
        # Only a process that broke without a word goes on: what it ran is in its figures.
        if code is None or outcome["state"] != "begun" or remaining_s < _RESTART_S:
            break
    if code is None:
        outcome |= {"state": "timed out", "why": f"ended at its limit of {each.limit_s:.0f} s"}
    elif outcome["state"] == "begun" or (code and outcome["state"] == "failed"):
        last = output.strip().splitlines()[-1:] or [f"exit code {code}"]
        outcome |= {"state": "failed", "why": outcome.get("why") or last[0][-500:]}
    outcome |= {"wall_s": round(time.monotonic() - begun_s, 2), "is_cpu": is_cpu}
    place.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return outcome


def _figures(out: Path, name: str) -> dict:
    with suppress(OSError, ValueError):
        return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["figures"]
    return {}


def finished(
    command: Sequence[str], environ: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Return exit code (None at the limit) and output; end all processes that it started."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output_file:
        process = subprocess.Popen(
            command,
            stdout=output_file,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=limit_s - _ENDING_S)
        _end(f"{_MARK}={environ.get(_MARK, '')}")
        process.wait()
        output_file.seek(0)
        return code, output_file.read()


def _end(mark: str) -> None:
    """End all started processes that still run, in any session."""
    for number in _marked(mark.encode()):
        with suppress(OSError):
            os.kill(number, signal.SIGKILL)


def _marked(mark: bytes) -> Iterable[int]:
    for place in Path("/proc").glob("[0-9]*/environ"):
        number = int(place.parent.name)
        with suppress(OSError):
            if number != os.getpid() and mark in place.read_bytes().split(b"\0"):
                yield number


@contextmanager
def packed_often(out: Path, archive: Path) -> Iterator[None]:
    """Pack meanwhile as well: the machine may go away before a measurement ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_PACK_S):
            with suppress(OSError):  # a file is being written
                pack(out, archive)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def pack(out: Path, archive: Path) -> None:
    """Pack all results so far into one file."""
    part = archive.with_suffix(".part")
    with _packing:
        with tarfile.open(part, "w:gz") as packed:
            packed.add(out, arcname=out.name)
        os.replace(part, archive)


if __name__ == "__main__":
    sys.exit(main())
