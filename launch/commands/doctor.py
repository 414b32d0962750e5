"""``forerun doctor``: what is installed here and what would be attached, without torch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata

from ...hooks.process import PACKAGES, VARIABLE, installed_version, missing, remedy, see_node
from ..sinks.wandb_sink import has_key
from .attached import Finding, Severity, attachment
from .outcome import print_json


def examine() -> list[Finding]:
    """All findings; imports neither torch nor megatron, so it is quick and harmless."""
    return [
        Finding(
            "python",
            platform.python_version(),
            Severity.OK if sys.version_info < (3, 14) else Severity.WARN,
        ),
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


def _package(name: str, absent: Severity = Severity.WARN) -> Finding:
    version = installed_version(name)
    if version is None:
        return Finding(name, "not installed", absent, f"pip install {name}")
    return Finding(name, version)


def _answers() -> Finding:
    """Where the process beside training would run, and what the verbs that answer lack."""
    lacking = missing()
    if not lacking:
        return Finding("answers", "packages for answers found in this Python")
    named = os.environ.get(VARIABLE)
    return Finding(
        "answers",
        f"by {VARIABLE}={named}" if named else "not available here; training is still recorded",
        Severity.OK if named else Severity.WARN,
        f"for answers here: {remedy()} (missing: {', '.join(lacking)})"
        + ("" if named else ", or name a Python that has them: --calibrate-python=PATH"),
    )


def _trees() -> Finding:
    """Which trees learn many shapes; two distributions write the same files of one ``xgboost``."""
    found = [f"{name} {v}" for name in ("xgboost", "xgboost-cpu") if (v := installed_version(name))]
    if len(found) > 1:
        return Finding(
            "trees",
            " and ".join(found),
            Severity.WARN,
            "both install the same files: pip uninstall xgboost xgboost-cpu, then install one of "
            "them",
        )
    value = found[0] if found else "scikit-learn's forest, because xgboost is not installed"
    return Finding("trees", value)


def _torch() -> Finding:
    version = installed_version("torch")
    if version is None:
        return Finding(
            "torch",
            "not installed",
            Severity.WARN,
            "predict, plan and report work without it; recording needs it",
        )
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2])
    if parts < (2, 5):
        return Finding(
            "torch",
            version,
            Severity.WARN,
            "the bare flag needs 2.5; use: torchrun ... -m forerun.launch script.py",
        )
    return Finding("torch", version)


def _megatron() -> Finding:
    version = installed_version("megatron-core")
    if version is None:
        found = importlib.util.find_spec("megatron") is not None
        return Finding(
            "megatron-core",
            "from a checkout" if found else "not installed",
            Severity.OK if found else Severity.WARN,
            "" if found else "a Megatron-LM clone brings its own; else pip install megatron-core",
        )
    has_training = importlib.util.find_spec("megatron.training") is not None
    hosts = "megatron.training and megatron.core" if has_training else "megatron.core"
    return Finding("megatron-core", f"{version}, patches for {hosts}")


def _nccl() -> Finding:
    wheels = sorted(
        f"{name} {d.version}"
        for d in metadata.distributions()
        if (name := str(d.metadata["Name"] or "")).startswith("nvidia-nccl")
    )
    if len(wheels) > 1:
        return Finding(
            "nccl",
            ", ".join(wheels),
            Severity.WARN,
            "both install the same library; keep the one that torch requires",
        )
    return Finding("nccl", wheels[0] if wheels else "none (CPU torch: gloo)")


def _network() -> Finding:
    """What a run on this node would see of its network."""
    node = see_node(os.environ, num_ranks=0, num_local_ranks=0)
    if text := node.text:
        return Finding("network", text)
    return Finding(
        "network",
        "not visible here: the usual links of the device are assumed",
        remedy="describe it to predict and plan with --cluster FILE; see docs/cluster.md",
    )


def _wandb() -> Finding:
    version = installed_version("wandb")
    if version is None:
        return Finding(
            "wandb",
            "not installed: nothing is logged to W&B",
            Severity.OK,
            "pip install wandb, if you want it",
        )
    mode = os.environ.get("WANDB_MODE")
    if mode:
        state = f"mode {mode}"
    else:
        key = "a key was found" if has_key() else "no key"
        state = f"{key}; Forerun's own run stays offline without --calibrate-wandb=on"
    return Finding("wandb", f"{version}, {state}")


def doctor(args: argparse.Namespace) -> int:
    """Print all findings; 1 where something is missing, else 0."""
    findings = examine()
    if args.json:
        rows = [asdict(f) | {"verdict": f.verdict.value} for f in findings]
        print_json({"findings": rows})
    else:
        print("\n".join(_lines(findings)))
    return int(any(f.verdict is Severity.MISSING for f in findings))


def _lines(findings: Sequence[Finding]) -> list[str]:
    """One line for each fact, and below it the remedy where there is one."""
    name, verdict = (
        max(len(word) for word in words)
        for words in zip(*[(f.name, f.verdict.value) for f in findings], strict=True)
    )
    lines = []
    for found in findings:
        lines.append(f"{found.name:{name}}  {found.verdict.value:{verdict}}  {found.value}")
        if found.remedy:
            lines.append(f"{'':{name}}  {'':{verdict}}  -> {found.remedy}")
    return lines
