"""``forerun explain``: why a layout takes what it takes, and why it is faster than another."""

from __future__ import annotations

import argparse

from .answer_commands import opened, other_run
from .outcome import ExitCode, print_json, tell


def explain(args: argparse.Namespace) -> int:
    """Print the terms of a step, or of the difference of two."""
    found = opened(args).explain(args.layout, args.other, gpus=args.gpus, **other_run(args))
    tell(*found.notes)
    if args.json:
        print_json(found.to_json())
    else:
        for text in found.parts():
            print(text)
    if args.svg is not None:
        found.write_svg(args.svg)
        tell(f"waterfall written to {args.svg}")
    if args.timeline is not None:
        found.write_timeline(args.timeline)
        tell(f"trace for ui.perfetto.dev written to {args.timeline}")
    return ExitCode.ANSWER
