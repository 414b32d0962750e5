"""The step of one layout: what ``forerun predict`` tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

from ...calib.advice import Candidate, MemoryRoom, Remedy, compare
from ...calib.arguments import LAYOUT_NAMES, AxisValue, apply_options, options_of, untaken
from ...calib.errors import ConfigError, ForerunError
from ...calib.fit.priors import is_processor
from ...calib.forecast import WholeRun, whole_run
from ...calib.memory import MemoryEstimate, Verdict, host_nbytes, known_device
from ...calib.network.cluster import link_figures
from ...calib.records import stamped
from ...calib.shell import joined
from ...calib.steps import FittedSteps
from ...calib.units import format_bytes, format_time
from ...calib.workload import RunConfig, at_least_one, shown, takes_options, whole
from ..known.machines import Machine
from ..options.plan_options import read_prices, read_tokens
from .other_run import OtherRun
from .told import Told
from .traced import write_trace

Options: TypeAlias = "Sequence[str] | Mapping[str, Any]"
"""Megatron's options as words, or by name: True for a switch, several values as a list."""
_LARGER = ("H200", "B200", "B300")
"""Devices that a layout may fit on."""
_NUM_DEVICES = 2
_COLUMNS = 80
_KEPT = "\u00a0"
"""A space at which no line ends."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Prediction(Told):
    """The step of a layout, with a 90 % interval, against the running one where that does the same
    work."""

    run_id: str
    layout: Candidate
    running: RunConfig
    steps: FittedSteps
    """The model that it was asked of."""
    machine_on: Callable[[str], Machine]
    """The same on another device."""
    described: RunConfig
    """The run that options are laid over."""
    directory: Path
    other: OtherRun
    room: MemoryRoom | None
    """Memory of the device; None where nobody knows that, and on a CPU."""
    network: Mapping[str, Any]
    """What transfers were priced on, with where it comes from; empty without NCCL."""
    basis: str = ""
    """The source of its times, in words, where no run of the user was measured; else empty."""
    left_out: tuple[str, ...] = ()
    """What a description of another run says and the model does not know."""
    problems: tuple[str, ...] = ()
    """Damaged records, and what was not measured."""
    whole_run: WholeRun | None = None
    """From its first step to its last, where that was asked for."""

    def to_tokens(
        self, tokens: float | str | None, price_per_gpu_hour: float | str | None
    ) -> Prediction:
        """The same with the whole run to so many tokens, or as long as it is where a price alone is
        given; itself of neither.

        Raises ``ConfigError`` where nothing says how long the run is.
        """
        if tokens is None and price_per_gpu_hour is None:
            return self
        number = 0 if tokens is None else read_tokens(tokens)
        return replace(self, whole_run=self._length(number, price_per_gpu_hour))

    def _length(self, num_tokens: int = 0, price: float | str | None = None) -> WholeRun:
        prices = read_prices(None if price is None else str(price))
        config, price_per_gpu_hour = self.layout.config, next(iter(prices), None)
        return whole_run(
            config, self.steps, num_tokens=num_tokens, price_per_gpu_hour=price_per_gpu_hour
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know beside it."""
        return (*self.left_out, *self.problems)

    @property
    def label(self) -> str:
        """The layout in short, as ``TP4 PP2 mbs2``."""
        return self.layout.label

    @property
    def step_time_s(self) -> float:
        """The predicted step, seconds."""
        return self.layout.step_time_s

    @property
    def low_s(self) -> float:
        """Lower end of its 90 % interval, seconds."""
        return self.layout.low_s

    @property
    def high_s(self) -> float:
        """Upper end of its 90 % interval, seconds."""
        return self.layout.high_s

    @property
    def time_frac(self) -> float | None:
        """The step over that of the running layout, minus one; None where that trains another model
        or batch, or runs on another device."""
        return self.layout.time_frac if self.layout.is_comparable else None

    @property
    def memory(self) -> MemoryEstimate:
        """Peak memory of the fullest device."""
        return self.layout.memory

    @cached_property
    def largest_micro_batch(self) -> Remedy | None:
        """The largest micro-batch that fits with all else as it is; None: none does, or nobody
        knows the memory."""
        return None if self.room is None else self.room.largest_micro_batch()

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """The cheapest options that would make it fit, then larger devices that it fits on; empty
        where it fits."""
        if self.room is None or self.layout.verdict is not Verdict.DOES_NOT_FIT:
            return ()
        return (*self.room.remedies(), *self._larger_devices())

    def _larger_devices(self) -> Iterator[Remedy]:
        found = 0
        for name in _LARGER:
            device = known_device(name)
            asked = replace(self.layout.config, device=device.driver_name)
            if found == _NUM_DEVICES or asked.device == self.layout.config.device:
                continue
            room = None
            with suppress(ForerunError):  # imported steps are of their own device alone
                room = _room(asked, self.machine_on(name))
            if room is not None and room.verdict(asked) is Verdict.FITS:
                found += 1
                (one,) = room.priced({("--device", name): asked})
                step_frac = one.layout.step_time_s / self.step_time_s - 1.0
                yield replace(one, slower_frac=step_frac)

    @property
    def options(self) -> tuple[str, ...]:
        """Megatron's options that give the layout."""
        return self.layout.options

    def to_json(self) -> dict[str, Any]:
        """As ``forerun predict --json``."""
        told = {"network": self.network, "left_out": list(self.left_out)}
        told["basis"] = self.basis or None
        largest = self.largest_micro_batch
        told["largest_micro_batch"] = None if largest is None else largest.to_json()
        told["remedies"] = [one.to_json() for one in self.remedies]
        told["whole_run"] = None if self.whole_run is None else self.whole_run.to_json()
        return stamped({"run_id": self.run_id, **self.layout.to_json(), **told})

    def write_sbatch(self, path: Path | str) -> None:
        """Write a script for ``sbatch`` whose ``--time`` holds 95 % of such runs.

        Raises ``ConfigError`` where the layout cannot run, or nothing says how long it runs.
        """
        from .batch_script import batch_script
        from .row_command import MARK, launch_for, write_script

        launch = launch_for(self.directory, self.run_id, self.described, self.other)
        said = (f"{MARK} for {self.run_id}", sentence(self.layout))
        run = self.whole_run or self._length()
        text = batch_script(self.layout, run, launch, self.described, said)
        write_script(path, text, "--sbatch")

    def write_timeline(self, path: Path | str) -> None:
        """Write its step as a trace for Perfetto, beside that of the running layout."""
        layouts = {"asked": self.layout.config, "running": self.running}
        if self.layout.config == self.running:
            del layouts["asked"]
        write_trace(path, self.steps, layouts)

    def parts(self) -> Iterator[str]:
        """The sentence, and the options where there are any to give."""
        yield sentence(self.layout)
        if self.room is not None:
            largest = self.largest_micro_batch
            size = "none" if largest is None else largest.text.removeprefix("--mbs ")
            yield f"largest micro-batch that fits: {size}"
        yield from () if self.whole_run is None else self.whole_run.lines
        if self.basis:
            yield self.basis
        if self.steps.left_out_log:
            yield "an option of this run is not modelled: the step may be off by a factor of 2 more"
        if self.layout.verdict is Verdict.DOES_NOT_FIT:
            yield "it does not fit in memory, so its options are not printed"
            if self.remedies:
                told = ", ".join(one.text.replace(" ", _KEPT) for one in self.remedies)
                lines = fill(f"it would fit with {told}", _COLUMNS, break_on_hyphens=False)
                yield lines.replace(_KEPT, " ")
        elif clause := untaken(self.layout.config, self.running):
            yield f"{clause}; its options are not printed"
        elif takes_options(self.running):
            yield joined(self.options)


def predicted(
    machine: Machine,
    words: Sequence[str],
    other: OtherRun,
    machine_on: Callable[[str], Machine],
    directory: Path,
) -> Prediction:
    """The step of the layout that options say over the run, or over another.

    Raises ``ConfigError`` for an option that is not known, and a layout that cannot be.
    """
    own = machine.own
    machine, base, notes = other.of(machine, _num_ranks(words))
    config = apply_options(base, words)
    (candidate,) = compare(
        own,
        [config],
        machine.steps,
        memory_capacity_nbytes=machine.memory_capacity_nbytes,
        memory_offset_nbytes=machine.memory_offset_nbytes,
        is_running=machine.runs(config),
    )
    return Prediction(
        run_id=machine.name,
        layout=candidate,
        running=own,
        steps=machine.steps,
        machine_on=machine_on,
        described=base,
        directory=directory,
        other=other,
        room=_room(config, machine),
        network=network_json(machine),
        basis=machine.basis,
        left_out=notes,
        problems=machine.problems,
    )


def _room(config: RunConfig, machine: Machine) -> MemoryRoom | None:
    if not machine.memory_capacity_nbytes or is_processor(config.device):
        return None
    return MemoryRoom(
        asked=config,
        steps=machine.steps,
        capacity_nbytes=machine.memory_capacity_nbytes,
        offset_nbytes=machine.memory_offset_nbytes,
    )


def words_of(options: Options, layout: Mapping[str, AxisValue]) -> list[str]:
    """Short names and Megatron's options as the words of a command line.

    ``ConfigError`` with the nearest name for one that no layout has.

    >>> words_of({"micro_batch_size": 2, "swiglu": True}, {"tp": 4})
    ['--tp=4', '--micro-batch-size', '2', '--swiglu']
    """
    names = [name for axis in LAYOUT_NAMES for name in (axis.name, *axis.others)]
    for name in layout:
        if name not in names:
            raise ConfigError(_not_a_name(name, names))
    return [*(f"--{name}={value}" for name, value in layout.items()), *_options(options)]


def network_json(machine: Machine) -> dict[str, Any]:
    """What transfers were priced on, with where it comes from; empty without NCCL."""
    known = machine.steps.base.conditions.network
    figures = {} if known is None else link_figures(known)
    return {name: asdict(found) for name, found in figures.items()}


def sentence(candidate: Candidate) -> str:
    """A layout with its step, its throughput and its memory."""
    host = host_nbytes(candidate.config)
    against = f"{candidate.against_text} against the running layout" * candidate.is_comparable
    parts = (
        f"{candidate.label}: step {format_time(candidate.step_time_s)} (90 %: "
        f"{format_time(candidate.low_s)} to {format_time(candidate.high_s)})",
        candidate.throughput.text,
        against,
        f"memory {format_bytes(candidate.memory.total_nbytes)}",
        f"host memory {format_bytes(host)} a node" if host else "",
        candidate.routing.text if candidate.routing is not None else "",
    )
    return " · ".join(filter(None, parts))


def _num_ranks(words: Sequence[str]) -> int:
    """The value of ``--gpus`` among the options of a layout; 0 where it is not given."""
    given = next((words for option, words in options_of(words) if option == "--gpus"), [])
    if not given:
        return 0
    number = whole("gpus", given[0])
    at_least_one("--gpus", number)
    return number


def _options(options: Options) -> Iterator[str]:
    if isinstance(options, str):
        raise ConfigError(
            f"{shown(options)} is a single string; give a list of words, or a mapping"
        )
    if not isinstance(options, Mapping):
        yield from options
        return
    for name, value in options.items():
        option = name.lstrip("-").replace("_", "-")
        if value is False:
            yield f"--no-{option}"
            continue
        yield f"--{option}"
        if value is not True:
            is_one = isinstance(value, str) or not isinstance(value, Sequence)
            yield from (str(one) for one in ((value,) if is_one else value))


def _not_a_name(name: str, names: Sequence[str]) -> str:
    import difflib  # no answer needs it

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
    return f"{shown(name)} is not an axis of a layout; {remedy}"
