"""``forerun predict``, and what it shares with ``plan``: questions to a calibrated run; no torch.

What only fitting needs is not imported here: an answer of a kept fit is quick.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ...calib.advice.plan import Candidate, compare
from ...calib.arguments.megatron_args import apply_options
from ...calib.arguments.megatron_options import options_of
from ...calib.arguments.taken_options import untaken
from ...calib.errors import ForerunError
from ...calib.fit.priors import UNKNOWN_DEVICE, device_prior
from ...calib.memory.devices import known_device
from ...calib.memory.peak import Verdict
from ...calib.network.cluster import link_figures
from ...calib.units import format_bytes, format_frac, format_time
from ...calib.workload.argument_values import whole
from ...calib.workload.config import RunConfig
from ...calib.workload.hosts import takes_options
from ...calib.workload.model_shape import at_least_one
from ..known.machines import Machine, open_machine
from ..options.cluster_files import read_cluster
from .outcome import ExitCode, print_json, tell


def predict(args: argparse.Namespace) -> int:
    """Print the step of another layout; 1 where it is slower than ``--fail-over``."""
    machine = machine_of(args, args.device)
    own = machine.own
    base = described(args, own, _num_ranks(args.options)) or own
    config = apply_options(base, args.options)
    (candidate,) = compare(
        own,
        [config],
        machine.steps,
        memory_capacity_nbytes=machine.memory_capacity_nbytes,
        memory_offset_nbytes=machine.memory_offset_nbytes,
    )
    if args.json:
        print_json(
            {"run_id": machine.name, **candidate.to_json(), "network": network_json(machine)}
        )
    else:
        tell(*machine.problems)
        print(_line(candidate))
        if candidate.verdict is Verdict.DOES_NOT_FIT:
            print("it does not fit in memory: no options are given")
        elif clause := untaken(config, own):
            print(f"{clause}: no options are given")
        elif takes_options(own):
            print(shlex.join(candidate.options))
    is_over = args.fail_over is not None and candidate.step_time_s > args.fail_over
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def machine_of(args: argparse.Namespace, device: str | None = None) -> Machine:
    """The step model that the options ask for, on the run's own device or on another.

    A device that the run was on, by a short name or its own, is the run's own.
    """
    opened = partial(
        open_machine,
        args.directory,
        run_id=args.run_id,
        machine=args.machine,
        also=args.also or (),
        like=args.like,
        stated=read_cluster(args.cluster),
    )
    if device is None:
        return opened()
    wanted = known_device(device).driver_name
    try:
        own = opened()
    except ForerunError:  # Probes alone answer for other devices, not for a run of their own.
        return opened(device=wanted)
    here = device_prior(own.own.device).name
    is_own = here != UNKNOWN_DEVICE and here == device_prior(wanted).name
    return own if is_own or own.own.device == wanted else opened(device=wanted)


def network_json(machine: Machine) -> dict[str, Any]:
    """What transfers were priced on, with where it comes from; empty without NCCL."""
    known = machine.steps.base.conditions.network
    figures = {} if known is None else link_figures(known)
    return {name: asdict(found) for name, found in figures.items()}


def described(args: argparse.Namespace, own: RunConfig, num_ranks: int) -> RunConfig | None:
    """The run that ``--config`` or the command behind ``--`` describes, on the device of this one.

    What it leaves out is told on standard error.  None where neither is given.
    """
    if args.config is None and not args.command:
        return None
    from ..options.config_files import described_run  # no other question needs such files

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
        f"{candidate.throughput.text} · "
        f"{format_frac(candidate.time_frac, signed=True)} against the running layout · memory "
        f"{format_bytes(candidate.memory.total_nbytes)}"
        + (f" · {candidate.routing.text}" if candidate.routing is not None else "")
    )
