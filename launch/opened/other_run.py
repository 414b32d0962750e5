"""Another run on the same calibration, described by a file of arguments or a command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from ...calib.arguments.launchers import ASIDE_VARIABLES, is_of_library, reason
from ...calib.arguments.megatron_command import Described, program_of, split_launcher
from ...calib.arguments.megatron_options import (
    ASIDE,
    MODELLED,
    NAMES,
    SPELLED,
    UNMODELLED_FACTOR,
    moves,
)
from ...calib.errors import CalibrationError
from ...calib.records.cluster import Cluster, Origin, StatedNodes
from ...calib.units import format_bytes
from ...calib.workload.argument_values import name_of, option_of
from ...calib.workload.config import Fp8Recipe

if TYPE_CHECKING:
    from ...calib.workload.config import RunConfig
    from ...calib.workload.parallelism import Parallelism
    from ..known.machine import Machine
    from ..options.launch_scripts import LaunchScript


_RELEASES = f"{NAMES['releases'][0]} to {NAMES['releases'][-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """Description of another run; if empty, the run itself is meant."""

    config: Path | None = None
    command: tuple[str, ...] = ()
    is_any_answer: bool = False
    """Answer even if an option is not modelled."""
    without_effect: tuple[str, ...] = ()
    """Options of the user's script that change neither time nor memory."""
    script: LaunchScript | None = None
    """The script that the command is the launch of."""

    def of(self, machine: Machine, num_ranks: int) -> tuple[Machine, RunConfig, tuple[str, ...]]:
        """Return machine, run and notes: the described run on ``num_ranks`` ranks (0: as described)
        and the machine's device, and its omissions in words; the machine's run if none is
        described.

        The returned machine has wider intervals if something is left out that may change time, and
        the run more doubt of its memory if that may change it.  Raises ``ConfigError`` if a command
        does not state its ranks and only imported tables, which are of other runs, are known, and
        ``CalibrationError`` if something is left out that may change time.
        """
        running = machine.running
        if self.config is None and not self.command:
            return machine, running, ()
        from ..options.config_files import described_run  # needed only here

        is_run = machine.steps.base.conditions.is_in_situ
        described = described_run(
            self.config,
            self.command,
            running,
            num_ranks=num_ranks,
            usual_ranks=running.parallelism.num_ranks if is_run else 0,
            script=self.script,
        )
        if described is None:
            return machine, running, ()
        measured = running if is_run else None
        open_names = self.open_names(described, measured)
        unsized = [n for n in _unmodelled(described, measured) if moves(n, "memory")]
        config = replace(
            described.config,
            device=running.device,
            framework=described.config.framework or running.framework,
            parallelism=_joined(described.config.parallelism, machine),
            has_open_memory=bool(unsized),
            unmodelled=tuple(n for n in described.config.unmodelled if moves(n, "time")),
        )
        if open_names and not self.is_any_answer:
            is_sized = not (unsized or described.unknown)
            raise CalibrationError(open_names + (_memory_text(config) if is_sized else ""))
        excluded = {
            "not known and ignored": described.unknown,
            "left out by the model": config.unmodelled,
        }
        notes = [f"{what}: {', '.join(names)}" for what, names in excluded.items() if names]
        notes += _missing_units(config)
        if unsized:
            notes.append(
                f"{_options(unsized)} not modelled: memory may be off by a factor of "
                f"{UNMODELLED_FACTOR:g}"
            )
        if open_names:
            notes.append(f"answered anyway, and may be off by a factor of {UNMODELLED_FACTOR:g}")
            steps = replace(machine.steps, omission_log=math.log(UNMODELLED_FACTOR))
            machine = replace(machine, steps=steps)
        machine = replace(machine, has_layout=described.has_layout or not machine.basis)
        return machine, config, (*described.notes, *notes)

    def open_names(self, described: Described, running: RunConfig | None) -> str:
        """Return why the step of a described run gets no number; options that ``running`` shares
        were measured.

        Empty if there is a number.
        """
        unmodelled = [n for n in _unmodelled(described, running) if moves(n, "time")]
        if unmodelled and self._program == "pretrain_mamba.py":
            return (
                "layers of Mamba are not modelled before a run has timed them, so there is no "
                "number; --anyway answers, and may be off by a factor of 2 more"
            )
        if unmodelled:
            moved = "time or memory" if any(moves(n, "memory") for n in unmodelled) else "time"
            return (
                f"{_options(unmodelled)} not modelled and may change {moved}, so there is no "
                "number; --anyway answers, and may be off by a factor of 2 more"
            )
        # The measured steps of a run of the same script include the effect of its options.
        is_same = running is not None and running.program and running.program == self._program
        is_file = self.config is not None  # a file has only keys; a command may have stray words
        assumed = {*map(name_of, self.without_effect), *(ASIDE if is_file else ())}
        candidates = [
            n for n in described.unknown if is_file or n.startswith("-") or is_of_library(n)
        ]
        unknown = [name for name in candidates if name_of(name) not in assumed]
        if unknown and not is_same:
            if any("peft" in name or "lora" in name for name in map(name_of, unknown)):
                return f"{_options(unknown)} of adapters, and LoRA is not modelled"
            return (
                f"{_options(unknown)} in no known parser of Megatron-LM ({_RELEASES})"
                f"{_near(unknown)}, so there is no number; --assume-no-effect NAME answers if it "
                "changes neither time nor memory, --anyway in any case"
            )
        return ""

    @property
    def _program(self) -> str:
        launcher, rest = split_launcher(self.command)
        end = len(self.command) - len(rest)
        return program_of(self.command[len(launcher) : end]) if end else ""


def _memory_text(config: RunConfig) -> str:
    from ...calib.memory.peak import memory  # imports numpy

    return f"; memory {format_bytes(memory(config).total_nbytes)}"


def _unmodelled(described: Described, running: RunConfig | None) -> list[str]:
    """Return the unmodelled settings that the steps of ``running`` do not include."""
    measured = running.unmodelled if running is not None else ()
    known = {*measured, *ASIDE, *ASIDE_VARIABLES}
    return [name for name in described.config.unmodelled if name not in known]


def _joined(layout: Parallelism, machine: Machine) -> Parallelism:
    """Return the layout with hosts of one NVLink domain counted as one node, which no command
    states."""
    network = machine.steps.base.conditions.network
    if network is None or network.links is None:
        return layout
    topology = network.links.topology
    is_known = topology.origin("domain") is not Origin.PRIOR
    stated = StatedNodes(domain=topology.domain if is_known else None)
    return Cluster(stated=stated).with_domain_nodes(layout, machine.running.device)


def _missing_units(config: RunConfig) -> list[str]:
    """Return notes on number formats for which the device has no tensor cores."""
    from ...calib.fit.priors import device_prior  # slow to import

    notes = []
    if config.is_without_tensor_cores:
        notes.append(
            f"{config.device} has no tensor cores for bf16, so that products run at its rate of "
            "fp32; --fp16 uses them"
        )
    if config.fp8 is not Fp8Recipe.NONE and not device_prior(config.device).generation.has_fp8:
        notes.append(f"{config.device} has no units for FP8, so that it saves no time there")
    return notes


def _near(names: Sequence[str]) -> str:
    """Return a question for the first name that resembles a known one; empty without any."""
    known = (*MODELLED, *SPELLED)
    pairs = ((name, get_close_matches(name_of(name), known, 1, 0.85)) for name in names)
    return next((f" (did you mean {option_of(near[0])}?)" for _, near in pairs if near), "")


def _options(names: Sequence[str]) -> str:
    is_option = [not (is_of_library(name) or name.endswith(".py")) for name in names]
    words = [
        option_of(name_of(name)) if one else name
        for name, one in zip(names, is_option, strict=True)
    ]
    phrases = [f"{word} ({why})" if (why := reason(word)) else word for word in words]
    return f"{', '.join(phrases)} {'is' if len(phrases) == 1 else 'are'}"
