"""What is installed here and what would be attached: facts, one per row, never a failure."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib import metadata

from ...hooks.process.interpreter import PACKAGES, VARIABLE, missing, remedy
from ..sinks.wandb_sink import has_key
from .attached import attachment
from .findings import Finding, Severity


def examine() -> list[Finding]:
    """All findings; imports neither torch nor megatron, so it is quick and harmless."""
    return [
        Finding(
            name="python",
            value=platform.python_version(),
            verdict=Severity.OK if sys.version_info < (3, 14) else Severity.WARN,
        ),
        _package("forerun", Severity.MISSING),
        _answers(),
        *[_package(name) for name in PACKAGES],
        _trees(),
        _torch(),
        _megatron(),
        *attachment(),
        _nccl(),
        _wandb(),
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, absent: Severity = Severity.WARN) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(
            name=name, value="not installed", verdict=absent, remedy=f"pip install {name}"
        )
    return Finding(name=name, value=version, verdict=Severity.OK)


def _answers() -> Finding:
    """Where the process beside training would run, and what the verbs that answer lack."""
    lacking = missing()
    if not lacking:
        return Finding(name="answers", value="in this Python", verdict=Severity.OK)
    named = os.environ.get(VARIABLE)
    return Finding(
        name="answers",
        value=f"by {VARIABLE}={named}" if named else "not here; training is recorded all the same",
        verdict=Severity.OK if named else Severity.WARN,
        remedy=f"for answers here: {remedy()} (missing: {', '.join(lacking)})"
        + ("" if named else ", or name a Python that has it: --calibrate-python=PATH"),
    )


def _trees() -> Finding:
    """Which trees learn many shapes; two distributions write the same files of one ``xgboost``."""
    found = [f"{name} {v}" for name in ("xgboost", "xgboost-cpu") if (v := _version(name))]
    if len(found) > 1:
        return Finding(
            name="trees",
            value=" and ".join(found),
            verdict=Severity.WARN,
            remedy="both write the same files: pip uninstall xgboost xgboost-cpu, then install "
            "the one you want",
        )
    value = found[0] if found else "a forest of scikit-learn, since there is no xgboost"
    return Finding(name="trees", value=value, verdict=Severity.OK)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding(
            name="torch",
            value="not installed",
            verdict=Severity.WARN,
            remedy="predict, plan and report work without it; recording needs it",
        )
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2])
    if parts < (2, 5):
        return Finding(
            name="torch",
            value=version,
            verdict=Severity.WARN,
            remedy="the bare flag needs 2.5; use: torchrun ... -m forerun.launch script.py",
        )
    return Finding(name="torch", value=version, verdict=Severity.OK)


def _megatron() -> Finding:
    version = _version("megatron-core")
    if version is None:
        found = importlib.util.find_spec("megatron") is not None
        return Finding(
            name="megatron-core",
            value="from a checkout" if found else "not installed",
            verdict=Severity.OK if found else Severity.WARN,
            remedy=""
            if found
            else "a Megatron-LM clone brings its own; else pip install megatron-core",
        )
    has_training = importlib.util.find_spec("megatron.training") is not None
    seams = "megatron.training and megatron.core seams" if has_training else "megatron.core seams"
    return Finding(name="megatron-core", value=f"{version}, {seams}", verdict=Severity.OK)


def _nccl() -> Finding:
    wheels = sorted(
        f"{name} {d.version}"
        for d in metadata.distributions()
        if (name := str(d.metadata["Name"] or "")).startswith("nvidia-nccl")
    )
    if len(wheels) > 1:
        return Finding(
            name="nccl",
            value=", ".join(wheels),
            verdict=Severity.WARN,
            remedy="both write the same library; keep the one that torch asks for",
        )
    return Finding(
        name="nccl", value=wheels[0] if wheels else "none (CPU torch: gloo)", verdict=Severity.OK
    )


def _wandb() -> Finding:
    version = _version("wandb")
    if version is None:
        return Finding(
            name="wandb",
            value="not installed: nothing is logged there",
            verdict=Severity.OK,
            remedy="pip install wandb, where it is wanted",
        )
    mode = os.environ.get("WANDB_MODE")
    if mode:
        state = f"mode {mode}"
    else:
        key = "a key was found" if has_key() else "no key"
        state = f"{key}; a run of our own stays offline without --calibrate-wandb=on"
    return Finding(name="wandb", value=f"{version}, {state}", verdict=Severity.OK)
