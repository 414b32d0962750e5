"""``forerun predict``: the step of another layout; no torch.

Imports needed only for fitting are deferred, so that an answer from a cached fit is quick.
"""

from __future__ import annotations

import argparse
from typing import Any

from ...calib.workload.choices import NAMED_CHOICES
from ..options.plan_options import PLAN_OPTIONS
from .arguments import TIMELINE, ExitCode, add_schema, declare, print_notes
from .run_arguments import add_evidence, add_run, open_run, other_run, show_answer

_ARGUMENTS = """
--fail-over SECONDS  exit 1 if the step is slower than this
{whole_run}--sbatch FILE  write a script for sbatch whose --time holds the run with 95 %%
{timeline}"""
_LAYOUT = (
    "settings that differ from the run; Megatron's own options work as well, and --framework "
    "torchtitan, transformers, PyTorch or Lightning (--torch-compile) for a stack that is not its"
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``predict``; Megatron's options pass through under their names."""
    add_run(sub)
    sub.set_defaults(takes_options=True)
    add_evidence(sub)
    add_schema(sub, "answers")
    group = sub.add_argument_group("layout", _LAYOUT)
    for axis in NAMED_CHOICES:
        spec: dict[str, Any] = {"action": _Passed, "dest": "layout_words", "metavar": axis.metavar}
        group.add_argument(*axis.spellings, help=axis.help, **spec)
    of_run = (PLAN_OPTIONS[name].declaration for name in ("num_tokens", "prices"))
    declare(sub, _ARGUMENTS.format(whole_run="".join(of_run), timeline=TIMELINE))


class _Passed(argparse.Action):
    """Stores options and their values in command-line order."""

    def __call__(self, parser: Any, args: Any, value: Any, option: str | None = None) -> None:
        setattr(args, self.dest, (*(getattr(args, self.dest) or ()), f"{option}={value}"))


def run(args: argparse.Namespace) -> int:
    """Print the step of another layout; return 1 if it is slower than ``--fail-over``."""
    answer = open_run(args).predict(
        args.options,
        **other_run(args),
        tokens=args.tokens,
        price_per_gpu_hour=args.price_per_gpu_hour,
    )
    show_answer(args, answer)
    if args.sbatch is not None:
        answer.write_sbatch(args.sbatch)
        print_notes(f"sbatch {args.sbatch} starts it; read it first")
    is_over = args.fail_over is not None and answer.step_time_s > args.fail_over
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER
