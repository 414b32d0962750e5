"""Measurements that only a GPU allows, on a bare machine: one GPU, an installed torch, no network.

    python benchmarks/gpu/collect.py --out DIR [--part 1|2|3] [--wheels FOLDER] [--only NAME ...]
                                     [--cpu]

Each measurement runs in a process of its own that ends at its time limit; a part of them takes nine
minutes at most.  Figures are written immediately, ``DIR.tar.gz`` contains all of them, and
``judge.py`` makes a page of that on any machine.  Nothing is installed: Forerun is imported from
this clone, and packages missing on the machine from wheels.  ``--cpu`` rehearses as much as
possible on a CPU; its times are meaningless.  Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    Measurement("preflight", 1, 45.0),
    Measurement("events", 1, 55.0),
    Measurement("streams", 1, 40.0),
    Measurement("recipe", 1, 110.0),
    Measurement("groups", 1, 130.0),
    Measurement("trace", 1, 90.0),
    Measurement("pace", 1, 60.0),
    Measurement("capture", 2, 50.0),
    Measurement("fsdp", 2, 100.0),
    Measurement("probes", 2, 140.0),
    Measurement("overhead", 2, 240.0),
    Measurement("shapes", 3, 300.0),
)


def main() -> int:
    """Measure, and pack the results; return 0 if each measurement ran to its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), help="default: all")
    parser.add_argument("--wheels", type=Path, help="packages that this machine has not")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in MEASUREMENTS])
    parser.add_argument("--cpu", action="store_true", help="rehearse on a CPU in virtual time")
    args = parser.parse_args()
    chosen = [
        each
        for each in MEASUREMENTS
        if (args.part in (None, each.part)) and (not args.only or each.name in args.only)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    is_whole = True
    with tempfile.TemporaryDirectory(prefix="forerun-gpu-") as folder:
        environ = environment(Path(folder), args.wheels)
        for each in chosen:
            outcome = measure(each, args.out, Path(folder), environ, is_cpu=args.cpu)
            is_whole = is_whole and outcome["state"] in ("done", "not here")
            why = f": {outcome['why']}" if outcome.get("why") else ""
            print(f"{each.name}: {outcome['state']} in {outcome['wall_s']:.1f} s{why}", flush=True)
            pack(args.out)
    return 0 if is_whole else 1


def environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Return variables under which this Python finds Forerun and the packages in the wheels."""
    path = folder / "path"
    path.mkdir()
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with ZipFile(wheel) as packed:
            packed.extractall(path)
    if not _is_installed():
        _put_package(path)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    known = [str(path), *filter(None, [clean.get("PYTHONPATH")])]
    return clean | {"PYTHONPATH": os.pathsep.join(known), _MARK: folder.name}


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
    command += ["--limit", str(each.limit_s), *(["--cpu"] if is_cpu else [])]
    begun_s = time.monotonic()
    code, output = finished(command, environ, each.limit_s)
    (out / f"{each.name}.log").write_text(output[-_TAIL:], encoding="utf-8")
    outcome = {"schema": 1, "state": "failed", "figures": {}}
    with suppress(OSError, ValueError):
        outcome |= json.loads(place.read_text(encoding="utf-8"))
    if code is None:
        outcome |= {"state": "timed out", "why": f"ended at its limit of {each.limit_s:.0f} s"}
    elif outcome["state"] == "begun" or (code and outcome["state"] == "failed"):
        last = output.strip().splitlines()[-1:] or [f"exit code {code}"]
        outcome |= {"state": "failed", "why": outcome.get("why") or last[0][-500:]}
    outcome |= {"wall_s": round(time.monotonic() - begun_s, 2), "is_cpu": is_cpu}
    place.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return outcome


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


def pack(out: Path) -> Path:
    """Pack all results so far into one file next to the folder."""
    archive = out.with_name(f"{out.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        for path in files(out):
            packed.add(path, arcname=f"{out.name}/{path.relative_to(out)}")
    return archive


def files(out: Path) -> Iterable[Path]:
    """Yield the files of the archive: the folder and one level below it."""
    return sorted(path for path in (*out.glob("*"), *out.glob("*/*")) if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
