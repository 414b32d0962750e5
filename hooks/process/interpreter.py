"""Which Python answers beside training: this one, another that the user names, or none here.

Standard library only, and nothing of what it looks for is imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec

VARIABLE = "FORERUN_PYTHON"
EXTRA = "pip install 'forerun[analysis]'"
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
"""What every answer needs: the module's name and the oldest version, as in setup.cfg."""
NUMPY_2_ALONE = ("pyarrow", 26)
"""From this version on it cannot be imported beside NumPy 1, which its metadata do not say."""

COMPANION = f"{__name__.partition('.')[0]}.companion"
"""In the command line of every companion."""
_ELSEWHERE = """
import sys
sys.path[:] = [place for place in sys.path if place]
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
"""Nothing is taken from the working directory, as it would be with ``-m``."""


def companion_command(environ: Mapping[str, str], python: str = "") -> tuple[str, ...]:
    """The program that answers; empty where no interpreter with the packages is known.

    ``python``, which a user has named for this run, wins.  Else it is this interpreter where it has
    what answers need, else the one that ``FORERUN_PYTHON`` names.
    """
    if not python and not missing_packages():
        return (sys.executable, "-m", COMPANION)
    python = python or environ.get(VARIABLE, "")
    if not python:
        return ()
    code = _ELSEWHERE % {"extra": EXTRA, "version": running_version()}
    # Not the PYTHONPATH and PYTHONHOME of training: they lead to packages of another Python.
    return (os.path.expanduser(python), "-E", "-c", code)


def missing_packages() -> list[str]:
    """What answers need and this interpreter has not, or not new enough, in words.

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
    """The command that brings what answers need into this environment, and replaces nothing."""
    name, first = NUMPY_2_ALONE
    return EXTRA + (f" '{name}<{first}'" if _has_numpy_1() else "")


def missing_packages_message(what: str) -> str:
    """That ``what`` needs packages which are not here, and the remedy; empty where all are."""
    lacking = missing_packages()
    return f"{what} needs {', '.join(lacking)}: {install_command()}" if lacking else ""


def is_installed(module: str) -> bool:
    """True where a package can be imported; a folder of that name alone is none."""
    try:
        spec = find_spec(module)
    except ValueError:  # imported already, by somebody who leaves no trace of where from
        return True
    return spec is not None and spec.origin is not None


def no_live_answers_message(directory: object) -> str:
    """One line for a run whose records wait for an interpreter that can answer."""
    return (
        f"no live answers: this environment lacks {', '.join(missing_packages())}; records are kept in "
        f"{directory}; `forerun report {directory}` answers in an environment with "
        "forerun[analysis], and --calibrate-python=PATH to its Python gives live answers"
    )


def objection(recorder: str) -> str:
    """Why this interpreter cannot answer for training with that version; empty where it can."""
    if lacking := missing_packages():
        return f"{sys.executable} lacks {', '.join(lacking)}; run there: {install_command()}"
    version = running_version()
    if version != recorder:
        return (
            f"{sys.executable} has forerun {version} and training has {recorder}; "
            f"run there: pip install 'forerun[analysis]=={recorder}'"
        )
    return ""


def running_version() -> str:
    """That of the package that runs here."""
    # Not an import: a records folder named like the package may hide the package's own __init__.
    return getattr(sys.modules.get(__name__.partition(".")[0]), "__version__", "")


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    from importlib import metadata  # slow to import, and few answers have to ask

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has_numpy_1() -> bool:
    return _numbers(installed_version("numpy") or "2") < (2,)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("2.0.0rc1"), _numbers("24.07a0")
    ((2, 0, 0), (24, 7))
    """
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))
