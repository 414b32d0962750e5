"""``forerun doctor``: the findings as text or JSON, with nothing but the standard library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from .doctor import examine
from .findings import Finding, Severity


def doctor(args: argparse.Namespace) -> int:
    """Print all findings; 1 where something is missing, else 0."""
    findings = examine()
    if args.json:
        rows = [asdict(f) | {"verdict": f.verdict.value} for f in findings]
        print(json.dumps({"schema": 1, "findings": rows}, indent=2))
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
