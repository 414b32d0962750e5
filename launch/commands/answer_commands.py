"""``forerun predict``, and what it shares with other verbs: the run that options name; no torch.

What only fitting needs is not imported here: an answer of a cached fit is quick.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..opened.loading import load
from ..opened.run import Run
from ..opened.search_effort import search_effort
from ..options.without_directory import NO_DIRECTORY, num_ranks_of, run_words
from .outcome import ExitCode, print_json, tell


def predict(args: argparse.Namespace) -> int:
    """Print the step of another layout; 1 where it is slower than ``--fail-over``."""
    found = opened(args).predict(
        args.options,
        **other_run(args),
        tokens=args.tokens,
        price_per_gpu_hour=args.price_per_gpu_hour,
    )
    tell(*found.notes)
    if args.json:
        print_json(found.to_json())
    else:
        for line in found.parts():
            print(line)
    if args.sbatch is not None:
        found.write_sbatch(args.sbatch)
        tell(f"sbatch {args.sbatch} starts it; read it first")
    if args.timeline is not None:
        found.write_timeline(args.timeline)
        tell(f"trace for ui.perfetto.dev written to {args.timeline}")
    is_over = args.fail_over is not None and found.step_time_s > args.fail_over
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def normal(args: argparse.Namespace) -> int:
    """Print the place of a run among published ones."""
    from ..opened.placed import placed, placed_lines  # what reads tables is slow to import

    run = opened(args)
    found = placed(run)
    tell(*run.machine().problems)
    if args.json:
        print_json(found.to_json())
    else:
        print("\n".join(placed_lines(found)))
    return ExitCode.ANSWER


def opened(args: argparse.Namespace) -> Run:
    """The run of a directory with the evidence that the options name, searched as a verb does; of
    a device alone where there is no directory."""
    if str(args.directory) == NO_DIRECTORY:
        from ..opened.unmeasured import unmeasured

        return unmeasured(
            args.device.partition(",")[0],
            config=args.config,
            command=args.command,
            options=run_words(args),
            num_ranks=num_ranks_of(args),
            cluster=args.cluster,
            searching=search_effort,
        )
    return load(
        args.directory,
        run_id=args.run_id,
        machine=args.machine,
        also=args.also or (),
        like=args.like,
        device=args.device,
        cluster=args.cluster,
        searching=search_effort,
    )


def other_run(args: argparse.Namespace) -> dict[str, Any]:
    """What describes another run, by the names of a run's methods."""
    return {
        "config": args.config,
        "command": args.command,
        "anyway": args.anyway,
        "assume_no_effect": args.assume_no_effect or (),
    }
