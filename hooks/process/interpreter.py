"""Choice of the Python that answers during training: this one, a user-named one, or none.

Uses the standard library only, and imports nothing of what it looks for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "FORERUN_PYTHON"
PACKAGES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "numpy": ("numpy", (1, 26)),
    "scipy": ("scipy", (1, 11)),
    "pandas": ("pandas", (1, 5)),
    "pyarrow": ("pyarrow", (14,)),
    "scikit-learn": ("sklearn", (1, 3)),
    "threadpoolctl": ("threadpoolctl", (3,)),
    "rich": ("rich", (13,)),
    "Jinja2": ("jinja2", (3,)),
}
"""Requirements of answers: the module's name and the oldest version, as in setup.cfg."""
NUMPY_2_ALONE = ("pyarrow", 26)
"""Package and its first version that cannot be imported with NumPy 1, although its metadata allow
it."""

COMPANION = f"{__name__.partition('.')[0]}.companion"
"""Module in the command line of every companion."""
_SAFE_PATH = "import sys; sys.path[:] = filter(None, sys.path)"
"""Beginning of each program: unlike ``-m``, nothing is imported from the working directory."""
_HERE = f"{_SAFE_PATH}; from {COMPANION} import main; sys.exit(main())"
_ELSEWHERE = """
%(safe_path)s
try:
    from forerun.hooks.process.interpreter import objection
except ImportError as err:
    wrong = f"{sys.executable} has no forerun ({err}); run there: %(extra)s"
else:
    wrong = objection(%(version)r)
if wrong:
    sys.exit(f"[forerun] no live answers: {wrong}")
from forerun.companion import main  # an older forerun has none: the versions are compared first
sys.exit(main())
"""
"""Program for another interpreter."""


def companion_command(environ: Mapping[str, str], python: str = "") -> tuple[str, ...]:
    """Return the companion's command; empty if no interpreter with the packages is known.

    A ``python`` that the user has named for this run takes precedence.  Otherwise it is this
    interpreter if it has the requirements, else the one that ``FORERUN_PYTHON`` names.
    """
    if not python and not missing_packages():
        return (sys.executable, "-c", _HERE)
    python = python or environ.get(VARIABLE, "")
    if not python:
        return ()
    python = os.path.expanduser(python)
    python = os.path.abspath(python) if os.sep in python else python  # training may change places
    code = _ELSEWHERE % {
        "safe_path": _SAFE_PATH, "extra": _install_extra(), "version": running_version()
    }  # fmt: skip
    # -E: training's PYTHONPATH and PYTHONHOME lead to packages of another Python.
    return (python, "-E", "-c", code)


def missing_packages() -> list[str]:
    """Return the requirements that are missing here or too old, as text.

    >>> missing_packages()
    []
    """
    lacking = []
    for name, (module, oldest) in PACKAGES.items():
        if not is_installed(module):
            lacking.append(name)
        elif (version := installed_version(name)) is not None and _numbers(version) < oldest:
            lacking.append(f"{name} {'.'.join(map(str, oldest))} (here {version})")
    name, first = NUMPY_2_ALONE
    if _has_numpy_1() and _numbers(installed_version(name) or "0") >= (first,):
        lacking.append(f"{name}<{first} (here {installed_version(name)} and NumPy 1)")
    return lacking


def install_command() -> str:
    """Return the command that installs the requirements here without replacing packages."""
    name, first = NUMPY_2_ALONE
    return _install_extra() + (f" '{name}<{first}'" if _has_numpy_1() else "")


def _install_extra() -> str:
    return f"pip install '{install_source()}[analysis]'"


def install_source() -> Path:
    """Return the clone or wheel from which this package can be installed again."""
    clone = Path(__file__).resolve().parents[2]
    is_clone = (clone / "setup.cfg").is_file()
    return clone if is_clone else install_origin()[0] or Path("/path/to/forerun")


def install_origin() -> tuple[Path | None, bool]:
    """Return the folder or wheel that this package was installed from, None if that is
    unknown, and whether the installation is editable."""
    from importlib import metadata
    from urllib.parse import unquote, urlparse

    # A build in the working directory is also a distribution, but not an installed one.
    texts = [one.read_text("direct_url.json") for one in metadata.distributions(name="forerun")]
    try:
        origin = json.loads(next(filter(None, texts), "{}"))
        url = urlparse(str(origin["url"]))
        path = Path(unquote(url.path)) if url.scheme == "file" else None
        return path, bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, KeyError, AttributeError):
        return None, False


def missing_packages_message(what: str) -> str:
    """Return that ``what`` needs missing packages, and the remedy; empty if none are missing."""
    lacking = missing_packages()
    return f"{what} needs {', '.join(lacking)}: {install_command()}" if lacking else ""


def is_installed(module: str) -> bool:
    """Return True if a package can be imported; a mere folder of that name does not count."""
    try:
        spec = find_spec(module)
    except ValueError:  # imported already, without a __spec__
        return True
    return spec is not None and spec.origin is not None


def no_live_answers_message(directory: object) -> str:
    """Return a line for a run without an interpreter that can answer; its records remain."""
    return (
        f"no live answers: this environment lacks {', '.join(missing_packages())}; records are "
        f"kept in {directory}; `forerun report {directory}` answers in an environment with "
        f"these ({_install_extra()}), and --calibrate-python=PATH to its Python gives live answers"
    )


def objection(recorder: str) -> str:
    """Return why this interpreter cannot answer for training with version ``recorder``; else
    empty."""
    if lacking := missing_packages():
        return f"{sys.executable} lacks {', '.join(lacking)}; run there: {install_command()}"
    version = running_version()
    if version != recorder:
        return (
            f"{sys.executable} has forerun {version} and training has {recorder}; "
            f"install version {recorder} there: {_install_extra()}"
        )
    return ""


def running_version() -> str:
    """Return the version of the running package."""
    # No import: a records folder named like the package may shadow the package's __init__.
    return getattr(sys.modules.get(__name__.partition(".")[0]), "__version__", "")


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    from importlib import metadata  # slow to import and rarely needed

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has_numpy_1() -> bool:
    return _numbers(installed_version("numpy") or "2") < (2,)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> _numbers("2.0.0rc1"), _numbers("24.07a0")
    ((2, 0, 0), (24, 7))
    """
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))
