"""``forerun doctor``: installation check and attachment, without importing torch.

With a command, a directory or both it checks a launch: see ``lint``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from shutil import which

from ... import _forerun_autoload as entry
from ...calib.arguments.launchers import split_variables, variables_of
from ...calib.arguments.megatron_command import split_launcher
from ...calib.errors import ConfigError
from ...calib.records.cluster import Cluster
from ...hooks.process.interpreter import (
    PACKAGES,
    VARIABLE,
    install_command,
    install_origin,
    install_source,
    installed_version,
    missing_packages,
)
from ...hooks.process.node_topology import detect_node
from ...leaves import leaf
from ..known.node_links import detect_links
from ..options.flags import parse
from ..options.launch_scripts import inner_launch_line
from .arguments import RUN_ID, add_schema, declare, print_answer, print_notes

_DESCRIPTION = (
    "Without arguments: this environment.  With a command after --, a directory, or both: "
    "arguments and variables of that launch that waste time, distort measurements or risk the run, "
    "each with its gain by the model of the run. Write variables before the command: -- "
    "NCCL_DEBUG=INFO torchrun ..."
)
_ARGUMENTS = f"""
directory         the directory that --calibrate-dir named
{RUN_ID}--device NAME     as for predict; without a directory, by data sheets alone
--gpus N          number of ranks, if the launch command does not say it
--mtbf-hours H    mean time between failures of the job, in hours
--fail-over FRAC  exit 1 if the sure gains add up to more than this share of the step
"""
_OF_A_LAUNCH = ("command", "directory", "run_id", "device", "gpus", "mtbf_hours", "fail_over")


class Severity(Enum):
    """Severity of a finding for calibration."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the environment, with a remedy if it is a problem."""

    name: str
    value: str
    verdict: Severity = Severity.OK
    remedy: str = ""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``, all optional."""
    sub.description = _DESCRIPTION
    sub.set_defaults(takes_command=True)
    declare(sub, _ARGUMENTS, directory={"type": Path, "nargs": "?"}, gpus={"type": int})
    add_schema(sub, "lint")


def run(args: argparse.Namespace) -> int:
    """Print all findings; return 1 if something is missing, else 0."""
    if any(getattr(args, name) not in (None, []) for name in _OF_A_LAUNCH):
        from .lint import lint_launch

        findings = flag_findings(inner_launch_line(args.command or ()))
        try:
            code = lint_launch(args)
        except ConfigError:
            if not findings or args.directory or args.device:
                raise  # else: a launch that is no Megatron's, of which this much is known
        else:
            is_bad = (one for one in findings if one.verdict is not Severity.OK)
            print_notes(*(f"{one.value}: {one.remedy}" for one in is_bad))
            return code
    else:
        findings = examine()
    value = {"findings": [asdict(f) | {"verdict": f.verdict.value} for f in findings]}
    print_answer(args, value, _lines(findings))
    return int(any(f.verdict is Severity.MISSING for f in findings))


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line per finding, followed by its remedy if there is one."""
    name = max(len(f.name) for f in findings)
    verdict = max(len(f.verdict.value) for f in findings)
    for one in findings:
        yield f"{one.name:{name}}  {one.verdict.value:{verdict}}  {one.value}"
        if one.remedy:
            yield f"{'':{name}}  {'':{verdict}}  -> {one.remedy}"


def examine() -> list[Finding]:
    """Return all findings; imports neither torch nor megatron, so it is quick and free of side
    effects."""
    is_known = sys.version_info < (3, 14)
    return [
        Finding("python", platform.python_version(), Severity.OK if is_known else Severity.WARN),
        _package("forerun", Severity.MISSING),
        _answers(),
        *[_package(name) for name in PACKAGES],
        _trees(),
        _torch(),
        _megatron(),
        *attachment(),
        _nccl(),
        _network(),
        _wandb(),
    ]


def attachment(
    environ: Mapping[str, str] = os.environ, places: Sequence[str] | None = None
) -> list[Finding]:
    """Return findings on the entry point: installed, ours, and not hidden, disabled or misled.

    ``places`` are searched for modules that hide the package; by default the working directory,
    where a script next to it would look first, and ``PYTHONPATH``.
    """
    if places is None:
        places = ("", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))
    switch = _autoload(environ)
    return [*_entry_points(), *_clone(), *_shadows(places), switch, *_exported(environ)]


def flag_findings(words: Sequence[str]) -> list[Finding]:
    """Return what stands in the way of our flag in a launch, or that nothing does; empty without
    the flag.  Nothing is started; the script is compiled to see whether it has such an option."""
    variables, (_, command) = variables_of(words), split_variables(words)
    launcher, arguments = split_launcher(command)
    program = [*command[len(launcher) : len(command) - len(arguments)]]
    split, misplaced = entry.split(arguments), entry.split(launcher).flags
    is_by_variable = variables.get("FORERUN_CALIBRATE") == "1"
    if not (is_by_variable or split.flags or split.lookalikes or misplaced):
        return []
    script = next((Path(word) for word in program if word.endswith(".py")), None)
    places = [str(script.parent) if script else "", *filter(None, [variables.get("PYTHONPATH")])]
    findings = attachment({**os.environ, **variables}, places)
    problems = [*_of_program(script, split), *_of_python(command)]
    if misplaced:
        text = "the launcher gets it: write it behind the program"
        problems.append(_warn("launch", f"{' '.join(misplaced)} is before {program[-1]}", text))
    if "-c" in command[:2]:
        problems.append(_warn("launch", "code after -c is left alone", "put it into a file"))
    if all(one.verdict is Severity.OK for one in (*findings, *problems)):
        taken = " ".join(split.flags) or "FORERUN_CALIBRATE=1"
        text = (
            f"nothing stands in the way of {taken}, if torch is imported before arguments are read"
        )
        problems.append(Finding("launch", text))
    return [*findings, *problems]


def _of_program(script: Path | None, split: entry.FlagSplit) -> Iterator[Finding]:
    if script is not None and not script.is_file():
        yield _warn("launch", f"no script {script} here", "ask in its folder", Severity.MISSING)
    elif script is not None and not any("--forerun" in flag for flag in split.flags):
        with suppress(SyntaxError, ValueError):
            if entry.names_flag(compile(script.read_bytes(), script, "exec")):
                text = "write --forerun and --forerun-...= in its place"
                yield _warn("launch", f"{script} has a --calibrate of its own, and keeps it", text)
    if split.lookalikes and not split.flags:
        yield _warn("launch", f"{split.lookalikes[0]} is left to the program", "write --forerun")
    try:
        parse(split.flags, {}, (), ())
    except ConfigError as err:
        yield _warn("launch", str(err), "calibration would be off")


def _of_python(command: Sequence[str]) -> Iterator[Finding]:
    names = (*entry.PROGRAMS, "python", "python3")
    path = next((found for w in command if Path(w).name in names and (found := which(w))), None)
    if path and Path(path).parent != Path(sys.executable).parent:
        text = f"ask there: {Path(path).parent}/python -m forerun doctor -- ..."
        yield _warn("launch", f"{path} is of another environment than this one", text)


def _warn(name: str, value: str, remedy: str, verdict: Severity = Severity.WARN) -> Finding:
    return Finding(name, value, verdict, remedy)


def _package(name: str, absent: Severity = Severity.WARN) -> Finding:
    version = installed_version(name)
    if version is None:
        source = install_source() if name == "forerun" else name
        return Finding(name, "not installed", absent, f"pip install {source}")
    return Finding(name, version)


def _answers() -> Finding:
    """Return the Python in which the companion would run, and packages missing for answers."""
    lacking = missing_packages()
    if not lacking:
        return Finding("answers", "packages for answers found in this Python")
    text = f"for answers here: {install_command()} (missing: {', '.join(lacking)})"
    if named := os.environ.get(VARIABLE):
        return Finding("answers", f"by {VARIABLE}={named}", remedy=text)
    text += ", or name a Python that has them: --calibrate-python=PATH"
    return _warn("answers", "not available here; training is still recorded", text)


def _trees() -> Finding:
    """Return which tree library is used; two distributions install the same ``xgboost`` files."""
    names = ("xgboost", "xgboost-cpu")
    installed = [f"{name} {v}" for name in names if (v := installed_version(name))]
    if len(installed) > 1:
        text = "both install the same files: pip uninstall xgboost xgboost-cpu, then install one of"
        return _warn("trees", " and ".join(installed), f"{text} them")
    value = "scikit-learn's forest, because xgboost is not installed"
    return Finding("trees", installed[0] if installed else value)


def _torch() -> Finding:
    version = installed_version("torch")
    if version is None:
        text = "predict, plan and report work without it; recording needs it"
        return _warn("torch", "not installed", text)
    if tuple(int(p) for p in version.split("+")[0].split(".")[:2]) < (2, 5):
        text = "the bare flag needs 2.5; use: torchrun ... -m forerun.launch script.py"
        return _warn("torch", version, text)
    return Finding("torch", version)


def _megatron() -> Finding:
    version = installed_version("megatron-core")
    if version is not None:
        has_training = importlib.util.find_spec("megatron.training") is not None
        hosts = "megatron.training and megatron.core" if has_training else "megatron.core"
        return Finding("megatron-core", f"{version}, patches for {hosts}")
    if importlib.util.find_spec("megatron") is not None:
        return Finding("megatron-core", "from a checkout")
    text = "a Megatron-LM clone brings its own; else pip install megatron-core"
    return _warn("megatron-core", "not installed", text)


def _nccl() -> Finding:
    named = ((str(d.metadata["Name"] or ""), d.version) for d in metadata.distributions())
    wheels = sorted(f"{name} {v}" for name, v in named if name.startswith("nvidia-nccl"))
    if len(wheels) > 1:
        text = "both install the same library; keep the one that torch requires"
        return _warn("nccl", ", ".join(wheels), text)
    return Finding("nccl", wheels[0] if wheels else "none (CPU torch: gloo)")


def _network() -> Finding:
    """Return the network topology that a run on this node would detect."""
    node = detect_node(os.environ, num_ranks=0, num_local_ranks=0)
    if text := Cluster(seen=(node,)).with_links(detect_links()).seen[0].text:
        return Finding("network", text)
    value = "not visible here: the usual links of the device are assumed"
    text = "describe it to predict and plan with --cluster FILE; see docs/cluster.md"
    return Finding("network", value, remedy=text)


def _wandb() -> Finding:
    version = installed_version("wandb")
    if version is None:
        text = "pip install wandb, if you want it"
        return Finding("wandb", "not installed: nothing is logged to W&B", remedy=text)
    if mode := os.environ.get("WANDB_MODE"):
        return Finding("wandb", f"{version}, mode {mode}")
    has_key = leaf("..sinks.wandb_sink:has_key", __package__ or "")
    key = "a key was found" if has_key is not None and has_key() else "no key"
    state = f"{key}; Forerun's own run stays offline without --calibrate-wandb=on"
    return Finding("wandb", f"{version}, {state}")


def _entry_points() -> Iterator[Finding]:
    """Check our entry points: torch imports every one and fails if one is missing."""
    points = [e for e in metadata.entry_points(group="torch.backends") if e.name == "forerun"]
    if not points:
        text = "install forerun into this environment, or use -m forerun.launch"
        yield _warn("flag", "not attached", text, Severity.MISSING)
    reinstall = f"pip install {install_source()} again, or pip uninstall forerun"
    for point in points:
        module = point.value.partition(":")[0]
        spec = _spec(module)
        if spec is None:
            value, text = f"{point.value} is not found", f"import torch fails: {reinstall}"
            yield _warn("flag", value, text, Severity.MISSING)
        elif module != entry.__name__.rpartition(".")[2]:
            yield _warn("flag", f"{point.value}, from an older installation", reinstall)
        elif Path(str(spec)).read_bytes() != Path(entry.__file__).read_bytes():
            yield _warn("flag", f"{spec} is not {entry.__file__}, which runs here", reinstall)
        else:
            yield Finding("flag", f"--calibrate and --forerun via {point.value}")


def _spec(module: str) -> str | None:
    """Return the file of an installed module, without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _editable() -> Path | None:
    """Return the folder that an editable installation points to; None without one."""
    folder, is_editable = install_origin()
    return folder if is_editable else None


def _clone() -> Iterator[Finding]:
    folder = _editable()
    if folder is None:
        return
    if (folder / "launch" / "autoload.py").is_file():
        yield Finding("clone", f"editable, {folder}")
    else:
        text = "training runs as without forerun; pip install -e the clone at its new place"
        yield _warn("clone", f"editable, but {folder} is gone", text, Severity.MISSING)


def _shadows(places: Sequence[str]) -> Iterator[Finding]:
    """Yield files or folders of our name that Python would import before the package."""
    text = "a script beside it cannot import the package forerun and is not calibrated; rename it"
    for place in dict.fromkeys(places):
        for path in (Path(place, "forerun.py"), Path(place, "forerun")):
            if path.is_file() if path.suffix else _hides(path):
                yield _warn("in the way", str(path.absolute()), text)


def _hides(folder: Path) -> bool:
    """True if a folder hides the package; one without ``__init__.py`` hides only an editable
    installation."""
    if (folder / "launch" / "autoload.py").is_file():
        return False
    is_package = (folder / "__init__.py").is_file()
    return is_package or (folder.is_dir() and _editable() is not None)


def _autoload(environ: Mapping[str, str]) -> Finding:
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        text = "the bare flag does nothing; unset it or use -m forerun.launch"
        return _warn("autoload", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", text)
    if entry.is_off(environ):
        text = "calibration is switched off; unset it to calibrate"
        return _warn("autoload", f"{entry.OFF}={environ[entry.OFF]}", text)
    return Finding("autoload", "on")


def _exported(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield variables in this shell that only processes of a launch should have."""
    for name in (entry.OWNER, entry.TAKEN):
        if name in environ:
            text = f"it is meant for the children of a worker; unset {name}"
            yield _warn("environment", f"{name} is exported", text)
