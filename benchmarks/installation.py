"""Changes by ``pip install`` of the wheel to an environment with older packages.

``installation.py WHEEL [--keep 'pyarrow<26']``: makes an environment with NumPy 1.26, pandas 1.5,
protobuf 3.20 and an ``xgboost``, installs the base and then ``[analysis]``, and prints the output
of ``pip freeze`` before and after, and the hash of the GPU library of that ``xgboost``.  Exits with
1 if an existing package has changed.  Needs the package registry.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

OLDER = ("numpy==1.26.4", "pandas==1.5.3", "protobuf==3.20.3")
XGBOOST = "xgboost==2.1.4"


def main() -> int:
    """Install, compare and print; return 1 if something was replaced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--keep", nargs="*", default=["pyarrow<26"], help="beside [analysis]")
    args = parser.parse_args()
    wheel = args.wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        _install(python, *OLDER)
        _install(python, "--no-deps", XGBOOST)  # its NCCL wheel has hundreds of MB
        library = next(Path(folder).rglob("libxgboost.so"))
        frozen, digest = _freeze(python), _digest(library)
        print("before:", *sorted(frozen), sep="\n  ")
        _install(python, str(wheel))
        base = _freeze(python)
        print("with the base:", *_changes(frozen, base), sep="\n  ")
        _install(python, f"forerun[analysis] @ {wheel.as_uri()}", *args.keep)
        whole = _freeze(python)
        print("with [analysis]:", *_changes(base, whole), sep="\n  ")
        after = _digest(library)
        print(f"{library.name}: sha256 {digest} before, {after} after")
        _run(python, "-m", "forerun", "doctor")
        is_whole = frozen <= base <= whole and {n.partition("==")[0] for n in base - frozen} == {
            "forerun"
        }
        return int(not is_whole or digest != after)


def _install(python: Path, *what: str) -> None:
    _run(python, "-m", "pip", "install", "--quiet", *what)


def _run(python: Path, *words: str) -> None:
    subprocess.run([str(python), *words], check=False)


def _freeze(python: Path) -> frozenset[str]:
    done = subprocess.run(
        [str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    )
    # For a wheel installed from a file, pip freeze appends its location.
    return frozenset(line.partition(" @ ")[0] for line in done.stdout.splitlines())


def _changes(before: frozenset[str], after: frozenset[str]) -> list[str]:
    return [*(f"- {name}" for name in sorted(before - after)), *(
        f"+ {name}" for name in sorted(after - before)
    )]  # fmt: skip


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
