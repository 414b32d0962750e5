"""``forerun doctor``: the findings as a table or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from .doctor import examine
from .findings import Verdict


def doctor(args: argparse.Namespace) -> int:
    """Print all findings; 1 where something is missing, else 0."""
    findings = examine()
    if args.json:
        rows = [asdict(f) | {"verdict": f.verdict.value} for f in findings]
        print(json.dumps({"schema": 1, "findings": rows}, indent=2))
    else:
        table = Table(show_edge=False, pad_edge=False)
        for column in ("what", "found", "verdict", "remedy"):
            table.add_column(column)
        for finding in findings:
            table.add_row(finding.name, finding.value, finding.verdict.value, finding.remedy)
        Console().print(table)
    return int(any(f.verdict is Verdict.MISSING for f in findings))
