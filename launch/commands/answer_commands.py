"""``forerun predict`` and ``plan``: questions to a calibrated run; no torch needed.

What only fitting needs is not imported here: an answer of a kept fit is quick.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ...calib.advice.plan import Candidate, Plan, compare, takes_options
from ...calib.advice.plan import plan as make_plan
from ...calib.arguments.megatron_args import apply_options
from ...calib.arguments.megatron_options import options_of
from ...calib.errors import ConfigError
from ...calib.memory.peak import Verdict
from ...calib.network.cluster import link_figures
from ...calib.units import GIB, format_bytes, format_frac, format_time
from ...calib.workload.argument_values import whole
from ...calib.workload.config import RunConfig
from ...calib.workload.model_shape import at_least_one, at_most
from ..known.machines import Machine, open_machine
from ..options.cluster_files import read_cluster
from ..options.config_files import described_run
from ..report.layout_tables import layouts_table, routing_note, telling_note
from ..report.table import console, show_table
from .outcome import ExitCode, print_json, tell

# Anything above is a slip of units; it also keeps bytes within 64 bits.
_MOST_GIB = 1e9


def predict(args: argparse.Namespace) -> int:
    """Print the step of another layout; 1 where it is slower than ``--fail-over``."""
    machine = _machine(args)
    own = machine.own
    described = _described(args, own, _num_ranks(args.options))
    config = apply_options(described or own, args.options)
    (candidate,) = compare(
        own,
        [config],
        machine.steps,
        memory_capacity_nbytes=machine.memory_capacity_nbytes,
        memory_offset_nbytes=machine.memory_offset_nbytes,
    )
    if args.json:
        print_json({"run_id": machine.name, **candidate.to_json(), "network": _network(machine)})
    else:
        tell(*machine.problems)
        print(_line(candidate))
        if candidate.verdict is Verdict.DOES_NOT_FIT:
            print("it does not fit in memory: no options are given")
        elif takes_options(own):
            print(shlex.join(candidate.options))
    is_over = args.fail_over is not None and candidate.step_time_s > args.fail_over
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def plan(args: argparse.Namespace) -> int:
    """Print the layouts on a number of ranks, fastest first."""
    machine = _machine(args)
    found = _plan(args, machine)
    if args.json:
        top = [candidate.to_json() for candidate in found.candidates[: args.top]]
        value = {"run_id": machine.name, **found.to_json(), "candidates": top}
        value["network"] = _network(machine)
        print(json.dumps(value, indent=2))
    else:
        tell(*machine.problems)
        show_table(layouts_table(found, args.top), console())
        print(_offer(found))
        for note in filter(None, (routing_note(found), telling_note(found))):
            print(note)
    return ExitCode.ANSWER


def _offer(found: Plan) -> str:
    """The options of the fastest layout that may be offered, or what came nearest."""
    best = found.best
    if best is None:
        return " · ".join(filter(None, ["nothing faster to offer", found.nearest_miss]))
    if not takes_options(found.own.config):
        return f"fastest that may be offered: {best.label}"
    return f"{best.label}: {shlex.join(best.options)}"


def _machine(args: argparse.Namespace) -> Machine:
    return open_machine(
        args.directory,
        run_id=args.run_id,
        machine=args.machine,
        also=args.also or (),
        like=args.like,
        device=args.device,
        stated=read_cluster(args.cluster),
    )


def _network(machine: Machine) -> dict[str, Any]:
    """What transfers were priced on, with where it comes from; empty without NCCL."""
    known = machine.steps.base.conditions.network
    figures = {} if known is None else link_figures(known)
    return {name: asdict(found) for name, found in figures.items()}


def _plan(args: argparse.Namespace, machine: Machine) -> Plan:
    own = machine.own
    for option, count in (("--gpus", args.gpus), ("--top", args.top)):
        if count is not None and count < 1:
            raise ConfigError(f"{option} {count} is below 1; give a positive whole number")
        if count is not None:
            at_most(option, count)
    if args.memory_gib is not None and not 0 < args.memory_gib < _MOST_GIB:
        raise ConfigError(
            f"--memory-gib {args.memory_gib} is no memory; give a number above 0, of GiB"
        )
    capacity = machine.memory_capacity_nbytes
    if args.memory_gib is not None:
        capacity = int(args.memory_gib * GIB)
    described = _described(args, own, args.gpus or 0)
    config = described or own
    found = make_plan(
        config,
        machine.steps,
        num_ranks=args.gpus or config.parallelism.num_ranks,
        memory_capacity_nbytes=capacity,
        memory_offset_nbytes=machine.memory_offset_nbytes,
    )
    if not found.candidates:
        raise ConfigError(
            f"no layout of this model runs on {args.gpus} ranks with global_batch_size "
            f"{config.batch.global_batch_size}; choose a number of ranks that divides it"
        )
    return found


def _described(args: argparse.Namespace, own: RunConfig, num_ranks: int) -> RunConfig | None:
    """The run that ``--config`` or the command behind ``--`` describes, on the device of this one.

    What it leaves out is told on standard error.  None where neither is given.
    """
    found = described_run(args.config, args.command, own, num_ranks=num_ranks)
    if found is None:
        return None
    if found.unknown:
        tell(f"not known, and left out: {', '.join(found.unknown)}")
    if found.config.unmodelled:
        tell(f"left out by the model: {', '.join(found.config.unmodelled)}")
    return replace(found.config, device=own.device, framework=own.framework)


def _num_ranks(options: Sequence[str]) -> int:
    """The value of ``--gpus`` among the options of a layout; 0 where it is not given."""
    words = next((words for option, words in options_of(options) if option == "--gpus"), [])
    if not words:
        return 0
    number = whole("gpus", words[0])
    at_least_one("--gpus", number)
    return number


def _line(candidate: Candidate) -> str:
    return (
        f"{candidate.label}: step {format_time(candidate.step_time_s)} (90 %: "
        f"{format_time(candidate.low_s)} to {format_time(candidate.high_s)}) · "
        f"{format_frac(candidate.time_frac, signed=True)} against the running layout · memory "
        f"{format_bytes(candidate.memory.total_nbytes)}"
        + (f" · {candidate.routing.text}" if candidate.routing is not None else "")
    )
