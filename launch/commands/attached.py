"""What stands between the flags and a worker: findings of ``doctor``, from files and variables."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from ... import _forerun_autoload as entry


class Severity(Enum):
    """How a fact bears on calibration."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, and what to do about it where it stands in the way."""

    name: str
    value: str
    verdict: Severity = Severity.OK
    remedy: str = ""


def attachment(
    environ: Mapping[str, str] = os.environ, places: Sequence[str] | None = None
) -> list[Finding]:
    """Is the entry point there, is it ours, and does anything hide, switch off or mislead it?

    ``places`` are searched for what hides the package: as it stands the working directory, where
    a script beside it would look first, and ``PYTHONPATH``.
    """
    if places is None:
        places = ("", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))
    return [
        *_entry_points(),
        *_clone(),
        *_shadows(places),
        _autoload(environ),
        *_exported(environ),
    ]


def _entry_points() -> Iterator[Finding]:
    """Torch imports every entry point, and fails where one of them is not there."""
    points = [e for e in metadata.entry_points(group="torch.backends") if e.name == "forerun"]
    if not points:
        yield Finding(
            "flag",
            "not attached",
            Severity.MISSING,
            "install forerun into this environment, or use -m forerun.launch",
        )
    for point in points:
        module = point.value.partition(":")[0]
        value, remedy = f"--calibrate and --forerun via {point.value}", ""
        spec = _spec(module)
        if spec is None:
            value, remedy = f"{point.value} is not found", "import torch fails: "
        elif module != entry.__name__.rpartition(".")[2]:
            value, remedy = f"{point.value}, from an older installation", ""
        elif Path(str(spec)).read_bytes() != Path(entry.__file__).read_bytes():
            value, remedy = f"{spec} is not {entry.__file__}, which runs here", ""
        else:
            yield Finding("flag", value)
            continue
        yield Finding(
            "flag",
            value,
            Severity.MISSING if spec is None else Severity.WARN,
            f"{remedy}pip install forerun again, or pip uninstall forerun",
        )


def _spec(module: str) -> str | None:
    """The file of an installed module, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _editable() -> Path | None:
    """The folder that an editable installation points to."""
    # A build beside the working directory is a distribution as well, but none that was installed.
    texts = [found.read_text("direct_url.json") for found in metadata.distributions(name="forerun")]
    try:
        told = json.loads(next(filter(None, texts), "{}"))
        is_editable = bool(told.get("dir_info", {}).get("editable"))
        return Path(unquote(urlparse(str(told["url"])).path)) if is_editable else None
    except (ValueError, KeyError, AttributeError):
        return None


def _clone() -> Iterator[Finding]:
    folder = _editable()
    if folder is None:
        return
    if (folder / "launch" / "autoload.py").is_file():
        yield Finding("clone", f"editable, {folder}")
        return
    yield Finding(
        "clone",
        f"editable, but {folder} is gone",
        Severity.MISSING,
        "training runs as without forerun; pip install -e the clone at its new place",
    )


def _shadows(places: Sequence[str]) -> Iterator[Finding]:
    """A file or folder of our name that Python would find before the package."""
    for place in dict.fromkeys(places):
        for path in (Path(place, "forerun.py"), Path(place, "forerun")):
            if not (path.is_file() if path.suffix else _hides(path)):
                continue
            yield Finding(
                "in the way",
                str(path.absolute()),
                Severity.WARN,
                (
                    "a script beside it cannot import the package forerun and is not calibrated; "
                    "rename it"
                ),
            )


def _hides(folder: Path) -> bool:
    """A folder without ``__init__.py`` comes before an editable installation only."""
    if (folder / "launch" / "autoload.py").is_file():
        return False
    is_package = (folder / "__init__.py").is_file()
    return is_package or (folder.is_dir() and _editable() is not None)


def _autoload(environ: Mapping[str, str]) -> Finding:
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return Finding(
            "autoload",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            Severity.WARN,
            "the bare flag does nothing; unset it or use -m forerun.launch",
        )
    if entry.is_off(environ):
        return Finding(
            "autoload",
            f"{entry.OFF}={environ[entry.OFF]}",
            Severity.WARN,
            "calibration is switched off; unset it to calibrate",
        )
    return Finding("autoload", "on")


def _exported(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that only processes of a launch have, in the shell that asks."""
    for name in (entry.OWNER, entry.TAKEN):
        if name in environ:
            yield Finding(
                "environment",
                f"{name} is exported",
                Severity.WARN,
                f"it is meant for the children of a worker; unset {name}",
            )
    ranks = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environ]
    if ranks and "TORCHELASTIC_RUN_ID" not in environ:
        yield Finding(
            "environment",
            f"{', '.join(ranks)} exported, but there is no elastic agent",
            Severity.WARN,
            "torchrun, accelerate and deepspeed still pass the flags on; a launcher of your own "
            "that imports torch would take them itself: start it without these variables"
            if "LOCAL_RANK" in ranks
            else (
                "the bare flag does not take such a program for a worker; export LOCAL_RANK as "
                "well, or use -m forerun.launch"
            ),
        )
