"""``forerun doctor`` of a launch: options to change, and the gain of each change.

Needs more than the standard library only with a directory or a device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...calib.arguments.launchers import split_variables
from ...calib.arguments.megatron_command import (
    Described,
    config_from_command,
    program_of,
    split_launcher,
)
from ...calib.errors import ConfigError
from ...calib.lint.linter import Flaw, lint
from ...calib.lint.rule import stated_launch
from ...calib.memory.devices import known_device
from ...calib.shell import quoted
from ...calib.units import HOUR_S, format_bytes
from ...calib.workload.model_shape import at_least_one, at_most
from ..opened.other_run import OtherRun
from ..options.launch_scripts import inner_launch_line
from .arguments import ExitCode, print_answer, print_notes
from .run_arguments import open_run

if TYPE_CHECKING:
    from ...calib.lint.pricing import Pricing
    from ..known.machine import Machine

_SOME_DEVICE = "accelerator"
"""Device assumed for a command without a stated device: some GPU."""
_NOT_PRICED = "options of the launch are not known or not modelled, as a note says"
_PLANNED = "layouts, micro-batches and recompute are priced by: forerun plan {place}"
_UNSEEN = "variables exported by a shell or a scheduler are not read: write them before the command"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LintTarget:
    """Launch to check, with the machine that prices it."""

    words: Sequence[str]
    described: Described
    machine: Machine | None = None
    variables: Mapping[str, str] | None = None


def lint_launch(args: argparse.Namespace) -> int:
    """Print flaws of a launch; return 1 if the sure gains exceed ``--fail-over``."""
    if args.gpus is not None:
        at_least_one("--gpus", args.gpus)
        at_most("--gpus", args.gpus)
    if args.mtbf_hours is not None and not 0 < args.mtbf_hours < math.inf:
        raise ConfigError(f"--mtbf-hours {args.mtbf_hours} is not a time; give hours above 0")
    args.command = inner_launch_line(args.command)
    target = _with_directory(args) if args.directory is not None else _alone(args)
    launch = stated_launch(target.words, target.described.config, target.variables)
    pricing = _pricing(args, target)
    reason = {} if target.machine is None else {"unpriced": _NOT_PRICED}
    answer, overflow = lint(launch, pricing, **reason), _overflow(pricing)
    print_notes(*(target.machine.problems if target.machine is not None else ()))
    unknown = target.described.unknown
    if unknown:
        print_notes(f"not known and ignored: {', '.join(unknown)}")
    name = target.machine.name if target.machine is not None else None
    launch_notes = {"unknown": list(unknown), "does_not_fit": overflow or None}
    flaws = enumerate(answer.flaws, 1)
    lines = [line for number, flaw in flaws for line in _lines(number, flaw)]
    place = quoted(str(args.directory)) if args.directory else "--device NAME -- COMMAND"
    lines = [*filter(None, [overflow]), *(lines or ["nothing to improve in this launch"])]
    value = {"run_id": name, **launch_notes, **answer.to_json()}
    print_answer(args, value, [*lines, _PLANNED.format(place=place), _UNSEEN])
    is_over = args.fail_over is not None and answer.sure_frac > args.fail_over
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def _alone(args: argparse.Namespace) -> _LintTarget:
    """Return the target of a command without a run."""
    _, command = split_variables(args.command)
    if not command:
        raise ConfigError(
            "these options belong to a launch; give its command after --, or a directory"
        )
    described = config_from_command(args.command, num_ranks=args.gpus or 0)
    if args.device is None:
        is_cpu = "--distributed-backend gloo" in " ".join(command).replace("=", " ")
        config = replace(described.config, device="cpu" if is_cpu else _SOME_DEVICE)
        return _LintTarget(words=args.command, described=replace(described, config=config))
    config = replace(described.config, device=known_device(args.device).driver_name)
    from ..known.machine_fits import device_machine  # slow to import

    described = replace(described, config=config)
    return _LintTarget(words=args.command, described=described, machine=device_machine(config))


def _with_directory(args: argparse.Namespace) -> _LintTarget:
    """Return the target of a run's launch, or of another command on its calibration."""
    from ..known.machine import launch_of_run

    machine = open_run(args).machine()
    running, par = machine.running, machine.running.parallelism
    if not args.command:
        noted = launch_of_run(args.directory, machine.name, par)
        if not noted.argv:
            why = f"the launch command of {machine.name} is not recorded"
            raise ConfigError(f"{why}; give it after --")
        described, words = Described(config=running, unknown=()), (*noted.launcher, *noted.argv)
        variables = noted.environment
        return _LintTarget(words=words, described=described, machine=machine, variables=variables)
    described = config_from_command(
        args.command,
        num_ranks=args.gpus or 0,
        usual_ranks=par.num_ranks,
        ranks_per_node=par.ranks_per_node,
    )
    program = _program(split_variables(args.command)[1])
    absent = running.absent if program in ("", running.program) else ()
    config = replace(described.config, device=running.device, framework=running.framework)
    config = replace(config, program=program or running.program, absent=absent)
    return _LintTarget(
        words=args.command, described=replace(described, config=config), machine=machine
    )


def _program(command: Sequence[str]) -> str:
    """Return the script or module of a command; empty if it has only options."""
    launcher, rest = split_launcher(command)
    end = len(command) - len(rest)
    return program_of(command[len(launcher) : end]) if end else ""


def _pricing(args: argparse.Namespace, target: _LintTarget) -> Pricing | None:
    machine = target.machine
    if machine is None:
        return None
    if args.command:
        running = machine.running if args.directory else None
        if why := OtherRun(command=tuple(args.command)).open_names(target.described, running):
            print_notes(f"nothing is priced: {why.partition(', so there')[0]}")
            return None
    from ...calib.lint.pricing import Pricing  # only needed with a machine

    return Pricing(
        config=target.described.config,
        steps=machine.steps,
        budget=machine.budget,
        mtbf_s=args.mtbf_hours * HOUR_S if args.mtbf_hours else None,
    )


def _overflow(pricing: Pricing | None) -> str:
    """Return a line on memory if the launch does not fit its device; else empty."""
    if pricing is None or pricing.current.verdict.value != "does not fit":
        return ""
    needed, there = pricing.current.memory.total_nbytes, pricing.budget.capacity_nbytes or 0
    device = pricing.config.device
    return f"it does not fit: {format_bytes(needed)} of the {format_bytes(there)} of {device}"


def _lines(number: int, flaw: Flaw) -> list[str]:
    """Return the lines of a flaw: option, cost, reason, and replacement."""
    worth = flaw.gain.text if flaw.gain is not None else f"gain not known: {flaw.unpriced}"
    indent = " " * (len(str(number)) + 2)
    return [
        f"{number}. {flaw.remedy.what} · {flaw.rule.harm.value} · {worth}",
        f"{indent}{flaw.rule.why}",
        f"{indent}instead: {flaw.remedy.instead}",
    ]
