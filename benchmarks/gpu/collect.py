"""What only a GPU can show, measured on a bare machine: one GPU, a torch that is there, no network.

    python benchmarks/gpu/collect.py --out DIR [--part 1|2|3] [--wheels FOLDER] [--only NAME ...]
                                     [--cpu]

Measurements, each in a process of its own that ends at its time limit; a part of them takes nine
minutes at most.  What one has found is written at once, ``DIR.tar.gz`` holds all of it, and
``judge.py`` makes a page of that anywhere.  Nothing is installed: Forerun is found in this clone,
and packages that the machine has not are taken out of wheels.  ``--cpu`` rehearses on a CPU what
can be: its times mean nothing.  Needs the standard library alone.
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
"""What a part may take: machines are lent for ten minutes a command."""
_TAIL = 20_000
"""Characters of a measurement's output that are kept."""
_ENDING_S = 3.0
_MARK = "GPU_REPORT_RUN"
"""A variable that all that is started has: workers and companions have sessions of their own."""


@dataclass(frozen=True)
class Measurement:
    """One of them, in the order in which they are worth having."""

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
    """Measure, and pack what was found; 0 where each measurement came to its end."""
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
            found = measure(each, args.out, Path(folder), environ, is_cpu=args.cpu)
            is_whole = is_whole and found["state"] in ("done", "not here")
            why = f": {found['why']}" if found.get("why") else ""
            print(f"{each.name}: {found['state']} in {found['wall_s']:.1f} s{why}", flush=True)
            pack(args.out)
    return 0 if is_whole else 1


def environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Variables under which a Python here finds Forerun and what the wheels have."""
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
    """The package under its name, with the entry point that ``import torch`` looks for."""
    (path / "forerun").symlink_to(ROOT)
    (path / "_forerun_autoload.py").symlink_to(ROOT / "_forerun_autoload.py")
    told = configparser.ConfigParser()
    told.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [f"[{name}]\n{text.strip()}\n" for name, text in told["options.entry_points"].items()]
    home = path / "forerun-0.dist-info"
    home.mkdir()
    (home / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (home / "METADATA").write_text("Metadata-Version: 2.1\nName: forerun\nVersion: 0\n")


def measure(
    each: Measurement, out: Path, folder: Path, environ: dict[str, str], *, is_cpu: bool
) -> dict:
    """One measurement in its own process; what it has found by its limit, and how it ended."""
    place, work = out / f"{each.name}.json", folder / each.name
    place.unlink(missing_ok=True)
    work.mkdir()
    script = Path(__file__).with_name("measure.py")
    command = [sys.executable, str(script), each.name, "--out", str(place), "--work", str(work)]
    command += ["--limit", str(each.limit_s), *(["--cpu"] if is_cpu else [])]
    begun_s = time.monotonic()
    code, said = finished(command, environ, each.limit_s)
    (out / f"{each.name}.log").write_text(said[-_TAIL:], encoding="utf-8")
    found = {"schema": 1, "state": "failed", "figures": {}}
    with suppress(OSError, ValueError):
        found |= json.loads(place.read_text(encoding="utf-8"))
    if code is None:
        found |= {"state": "timed out", "why": f"ended at its limit of {each.limit_s:.0f} s"}
    elif found["state"] == "begun" or (code and found["state"] == "failed"):
        last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
        found |= {"state": "failed", "why": found.get("why") or last[0][-500:]}
    found |= {"wall_s": round(time.monotonic() - begun_s, 2), "is_cpu": is_cpu}
    place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def finished(
    command: Sequence[str], environ: dict[str, str], limit_s: float
) -> tuple[int | None, str]:
    """Exit code, None at the limit, and all that was said; what it started ends with it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=limit_s - _ENDING_S)
        _end(f"{_MARK}={environ.get(_MARK, '')}")
        process.wait()
        said.seek(0)
        return code, said.read()


def _end(mark: str) -> None:
    """Whatever still runs of what was started, in whichever session."""
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
    """All that was found by now, in one file beside the folder."""
    archive = out.with_name(f"{out.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        for path in files(out):
            packed.add(path, arcname=f"{out.name}/{path.relative_to(out)}")
    return archive


def files(out: Path) -> Iterable[Path]:
    """What belongs to the archive: the folder and one below it."""
    return sorted(path for path in (*out.glob("*"), *out.glob("*/*")) if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
