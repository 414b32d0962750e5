"""A calibrated run: ``forerun.load(DIR)``.  Data are read, fitted or imported on first use.

Its methods correspond to the verbs, which call them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.arguments.megatron_args import apply_options
from ...calib.arguments.megatron_command import Described
from ...calib.arguments.option_words import options_of
from ...calib.arguments.short_names import expand, split_degrees
from ...calib.errors import CalibrationError, ConfigError, ForerunError, RecordError
from ...calib.memory.devices import known_device
from ...calib.workload.choices import NAMED_CHOICES, layout_label
from ...calib.workload.config import Batch, RunConfig
from ...hooks.process.interpreter import install_command, is_installed
from ..options.flags import read_cluster
from ..store.run_folders import DECISION, SAMPLES, missing_run_message, object_of_run, top_of
from ._answer_types import PrintableAnswer
from .other_run import OtherRun

if TYPE_CHECKING:
    import pandas as pd

    from ...calib.advice.decision import Decision
    from ...calib.differences.levels import Difference
    from ...calib.forecast.evaluation import Ended
    from ...calib.forecast.forecast_record import Forecast
    from ...calib.search.results import Effort
    from ...calib.workload.choices import AxisValue
    from ..known.machine import Machine
    from ..known.runs import Loaded
    from ..options.launch_scripts import LaunchScript
    from ..options.plan_options import Several
    from ..views.table import ReportTable
    from ._layout_answers import ExplainAnswer, Named, Options, PlanAnswer, Prediction, Searching
    from ._report_answer import ReportAnswer


@contextmanager
def _named_file(name: str) -> Iterator[None]:
    """Name the published file whose content is damaged."""
    try:
        yield
    except ForerunError as err:
        raise RecordError(
            f"{name} is not readable ({err}); delete it, and the records are analysed again"
        ) from err


@contextmanager
def quiet_search(top: int) -> Iterator[Effort]:
    """Provide the effort of a silent search on one processor."""
    from ...calib.search.results import Effort

    yield Effort(top=top)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Run(PrintableAnswer):
    """Calibrated run as of its first use; load it again for newer data."""

    directory: Path
    """Directory given as ``--calibrate-dir``."""
    asked_run_id: str | None = None
    """Requested run; None: the newest."""
    asked_machine: str | None = None
    """Requested machine of imported steps; None: the only one."""
    also: tuple[Path, ...] = ()
    """Further directories whose measured steps are evidence."""
    like: Path | None = None
    """Directory of another machine's run, for operators that this one has not timed."""
    device: str | None = None
    """Device other than the run's."""
    cluster: Path | None = None
    """File that describes the links between GPUs."""
    searching: Searching = quiet_search
    """Context of a plan's search: progress output and number of processors."""
    _opened: dict[str | None, Machine] = field(default_factory=dict, init=False)
    """Machines by device; None: the run's device."""

    @cached_property
    def run_id(self) -> str:
        """Run id, or name of the imported machine."""
        if self.asked_run_id is not None:
            return self.asked_run_id
        from ..known.runs import has_run, newest_run_id

        if self.asked_machine is None and has_run(self.directory):
            return newest_run_id(self.directory) or self._loaded.table.run_id
        return self.machine().name

    @cached_property
    def forecast(self) -> Forecast:
        """Last published forecast of the run's end; without that file, the report's.

        Raises ``CalibrationError`` if the number of steps is unknown.
        """
        from ...calib.forecast.forecast_record import Forecast
        from ...calib.workload.config_json import decode
        from ...hooks.process.host_wandb import FORECAST

        value = self._read_published(FORECAST) or self.report().answer.forecast_json()
        if reason := value.get("reason_no_finish"):
            raise CalibrationError(f"run {self.run_id!r} has no forecast of its end: {reason}")
        with _named_file(FORECAST):
            return decode(Forecast, value)

    @cached_property
    def decision(self) -> Decision:
        """Last published advice; without that file, the report's."""
        from ...calib.advice.decision import Decision

        value = self._read_published(DECISION)
        if value is None:
            return self.report().answer.decision
        with _named_file(DECISION):
            return Decision.from_json(value)

    @cached_property
    def ended(self) -> Ended | None:
        """How the run ended; None while it goes on."""
        from ..store.forecast_log import read_forecasts

        return read_forecasts(top_of(self.directory)[0]).ended.get(self.run_id)

    def predict(
        self,
        options: Options = (),
        *,
        config: Path | str | None = None,
        command: Sequence[str] = (),
        anyway: bool = False,
        assume_no_effect: Sequence[str] = (),
        tokens: float | str | None = None,
        price_per_gpu_hour: float | str | None = None,
        **layout: AxisValue,
    ) -> Prediction:
        """Predict the step of another layout: ``run.predict(tp=4, mbs=2)``.

        ``layout`` are short names (``run.layout`` shows all); ``options`` are Megatron's, as words
        or by name.  ``config`` (Megatron's arguments, a Hugging Face ``config.json``, a checkpoint)
        or ``command`` describe another run on this calibration; ``anyway`` answers even if one of
        its options is not modelled, ``assume_no_effect`` names options of the user's script that
        change neither time nor memory.  ``tokens`` (``"1T"``) and ``price_per_gpu_hour`` add the
        whole run (``Prediction.whole_run``).

        Raises ``ConfigError`` for an unknown name and an impossible layout, and
        ``CalibrationError`` if the layout of the run is unknown.
        """
        from ._layout_answers import predicted, words_of

        other = self._other(config, command, anyway, assume_no_effect)
        prediction = predicted(self, words_of(options, layout), other)
        return prediction.to_tokens(tokens, price_per_gpu_hour)

    def plan(
        self,
        *,
        device: Several = None,
        config: Path | str | None = None,
        command: Sequence[str] = (),
        anyway: bool = False,
        assume_no_effect: Sequence[str] = (),
        num_rows: int = 0,
        **options: Any,
    ) -> PlanAnswer:
        """Rank layouts: ``run.plan(gpus=64)``, ``run.plan(gpus="8..1024", keep={"tp": 8})``.

        ``gpus`` is a number, several, or ``"8..1024"``; ``device`` one or several by name;
        ``global_batch_size`` samples, or ``"xGPUS"``; ``keep`` and ``why`` values of short names.
        All are the options of ``forerun plan`` (docs/plan.md), with ``_`` for ``-``.  At least
        ``num_rows`` layouts are searched for, whatever ``top`` shows.

        Raises ``ConfigError`` for invalid values, and if no layout runs.
        """
        from ..options.plan_options import read_question
        from ._layout_answers import planned

        question = read_question(device=self.device if device is None else device, **options)
        other = self._other(config, command, anyway, assume_no_effect)
        return planned(self, question, other, num_rows)

    def explain(
        self,
        layout: Named,
        other: Named | None = None,
        *,
        gpus: int | None = None,
        config: Path | str | None = None,
        command: Sequence[str] = (),
        anyway: bool = False,
        assume_no_effect: Sequence[str] = (),
    ) -> ExplainAnswer:
        """Explain the step time of a layout, or its difference from that of another.

        A layout is given as a plan prints it (``"TP4 PP2 DP2 mbs2"``), as a change of the running
        one (``"tp4 pp2"``), as ``"running"``, by its row in the plan, or as an object from an
        answer. ``gpus``: ranks of both (default: as in the run).

        Raises ``ConfigError`` for an invalid name and a layout that cannot run.
        """
        from ._layout_answers import explained

        described = self._other(config, command, anyway, assume_no_effect)
        return explained(self, layout, other, gpus, described)

    def diff(self, other: Run) -> Difference:
        """Compare the measured steps of another run (B) with those of this one (A).

        Raises ``CalibrationError`` if too few steps of either are recorded.
        """
        from ...calib.differences.two_runs import difference

        return difference(self._loaded.table, other._loaded.table)

    def report(self) -> ReportAnswer:
        """Analyse the run's records again and return the full report.

        Raises ``CalibrationError`` if too few steps are recorded.
        """
        return self._report

    @property
    def samples(self) -> pd.DataFrame:
        """Times of operators and transfers, one row for each in each window: docs/python.md."""
        return self._loaded.table.samples.copy()

    @property
    def steps(self) -> pd.DataFrame:
        """Steps, one row each, with their predictions: docs/python.md."""
        from ..store.forecast_log import read_forecasts
        from ..store.run_log import read_steps
        from ._step_frame import step_frame

        table, (top, _) = self._loaded.table, top_of(self.directory)
        made = read_forecasts(top).made.get(table.run_id, ())
        return step_frame(table, made, read_steps(top, table.run_id))

    @cached_property
    def config(self) -> RunConfig:
        """Configuration of the run: model, parallelism, batch and the rest."""
        return self.machine().running

    @cached_property
    def layout(self) -> dict[str, AxisValue]:
        """Running layout by the short names that ``predict`` takes."""
        return {one.name: one.read(self.config) for one in NAMED_CHOICES}

    def machine(self, device: str | None = None) -> Machine:
        """Return the step model on ``device``, else on the requested device, else on the run's.

        A short or full name of the run's device gives the run's machine.  Raises as
        ``open_machine`` does.
        """
        from ...calib.fit.priors import UNKNOWN_DEVICE, device_prior
        from ...calib.memory.devices import known_device

        device = self.device if device is None else device
        if device is None:
            return self._open(None)
        wanted = known_device(device).driver_name
        try:
            running_machine = self._open(None)
        except ForerunError:  # Probes alone define no run, but serve for other devices.
            return self._open(wanted)
        here = device_prior(running_machine.running.device).name
        is_same_device = here != UNKNOWN_DEVICE and here == device_prior(wanted).name
        return (
            running_machine
            if is_same_device or running_machine.running.device == wanted
            else self._open(wanted)
        )

    def to_json(self) -> dict[str, Any]:
        """Return run id and directory."""
        from ...calib.records.iso_times import stamped

        return stamped({"run_id": self.run_id, "directory": str(self.directory)})

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, run_id={self.run_id!r})"

    def parts(self) -> Iterator[ReportTable | str]:
        """Yield the run, its end, forecast or actual, and its decision so far."""
        from ...calib.answers.finish_line import ended_text

        yield f"run {self.run_id} in {self.directory}"
        for read_answer in (
            lambda: self.forecast if self.ended is None else ended_text(self.ended),
            lambda: self.decision,
        ):
            try:
                yield str(read_answer())
            except ForerunError as err:
                yield str(err)

    def _open(self, device: str | None) -> Machine:
        from ..known.machines import open_machine
        from ..options.flags import read_cluster

        if device not in self._opened:
            self._opened[device] = open_machine(
                self.directory,
                run_id=self.asked_run_id,
                machine=self.asked_machine,
                also=self.also,
                like=self.like,
                device=device,
                stated=read_cluster(self.cluster),
            )
        return self._opened[device]

    @cached_property
    def _loaded(self) -> Loaded:
        from ..known.runs import load as read

        return read(self.directory, self.asked_run_id)

    @cached_property
    def _report(self) -> ReportAnswer:
        from ._report_answer import make_report

        return make_report(self.directory, self._loaded)

    def _read_published(self, name: str) -> dict[str, Any] | None:
        """Return a file's object of this run; None if there is no readable one."""
        try:
            return object_of_run(self.directory, name, self.run_id)
        except RecordError:
            return None

    def _other(
        self,
        config: Path | str | None,
        command: Sequence[str],
        anyway: bool,
        assume_no_effect: Sequence[str],
    ) -> OtherRun:
        from ..options.launch_scripts import inner_launch_line, launch_script

        return OtherRun(
            script=launch_script(command),
            config=None if config is None else Path(config),
            command=inner_launch_line(command),
            is_any_answer=anyway,
            without_effect=tuple(assume_no_effect),
        )


_DATA_PATTERNS = ("records/*/*", SAMPLES, f"runs/*/{SAMPLES}", "imported/*.csv")
"""Files that make a directory loadable; any one suffices."""


def load(
    directory: Path | str | None = None,
    *,
    run_id: str | None = None,
    machine: str | None = None,
    also: Sequence[Path | str] = (),
    like: Path | str | None = None,
    device: str | None = None,
    cluster: Path | str | None = None,
    config: Path | str | None = None,
    command: Sequence[str] | str = (),
    searching: Searching = quiet_search,
) -> Run:
    """Return the run of a directory, or of one launch's folder in it, without reading it yet.

    Without a directory, ``load(device="H100", command="torchrun ...")`` is the run of that command
    on a device, from published measurements; ``config`` may describe it in place of ``command``.

    ``run_id``: which run (default: the newest); ``machine``: which machine of imported steps;
    ``also``: directories whose measured steps are further evidence; ``like``: a run of another
    machine whose operators are transferred; ``device``: another device, such as H100; ``cluster``:
    a JSON file of the links between GPUs (docs/cluster.md); ``searching``: context of plan
    searches.

    Raises ``RecordError`` if the directory holds neither records nor tables.
    """
    if not is_installed("numpy"):
        raise ImportError(f"answers need numpy; {install_command()}")
    config, cluster = (None if one is None else Path(one) for one in (config, cluster))
    words = ("bash", "-c", command) if isinstance(command, str) and command else command
    if directory is None and device is not None:
        how = {"config": config, "command": words, "cluster": cluster, "searching": searching}
        return unmeasured(device, **how)
    if directory is None or config is not None or words:
        raise ConfigError(
            "load() takes a directory, or a device and a command or a config; give a command over "
            "a directory to predict or plan"
        )
    home = Path(directory)
    top, _ = top_of(home)
    if not any(
        next(place.glob(pattern), None) for place in {home, top} for pattern in _DATA_PATTERNS
    ):
        raise RecordError(
            missing_run_message(home)
            or f"{home} has neither records nor {SAMPLES}; train with --calibrate "
            f"--calibrate-dir={home} first"
        )
    if run_id is not None:
        from ..known.runs import full_run_id

        run_id = full_run_id(home, run_id)
    return Run(
        directory=home,
        asked_run_id=run_id,
        asked_machine=machine,
        also=tuple(map(Path, also)),
        like=None if like is None else Path(like),
        device=device,
        cluster=cluster,
        searching=searching,
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Unmeasured(Run):
    """Described run on a device, from published measurements; nothing is read or written."""

    described: RunConfig
    config_file: Path | None = None
    command: tuple[str, ...] = ()
    script: LaunchScript | None = None
    """The script that the command is the launch of."""
    assumed: tuple[str, ...] = ()
    """Note on settings that nobody stated; empty if there is none."""

    @cached_property
    def run_id(self) -> str:
        """Device, by the driver's name."""
        return self.machine().name

    def __repr__(self) -> str:
        return f"Run(device={self.described.device!r}, layout={layout_label(self.described)!r})"

    def parts(self) -> Iterator[str]:
        """Yield the layout and the basis of answers."""
        yield f"{layout_label(self.described)} {self.machine().basis}"

    @cached_property
    def _loaded(self) -> Loaded:
        raise CalibrationError("a device alone has no records; train with --calibrate first")

    def _other(
        self,
        config: Path | str | None,
        command: Sequence[str],
        anyway: bool,
        assume_no_effect: Sequence[str],
    ) -> OtherRun:
        if config is None and not command:
            config, command = self.config_file, self.command
        other = super()._other(config, command, anyway, assume_no_effect)
        return replace(other, script=other.script or self.script)

    def _open(self, device: str | None) -> Machine:
        if device not in self._opened:
            from ...calib.differences.norms import modelled_nearest  # slow to import, like these
            from ...calib.fit.priors import device_prior
            from ...calib.fit.rate_priors import measured_devices
            from ..known.machine_fits import device_machine
            from ..known.table_files import published_rows

            config = replace(self.described, device=device or self.described.device)
            machine = device_machine(config, read_cluster(self.cluster))
            nearest = modelled_nearest(machine.running, machine.steps, published_rows())
            known = measured_devices(config.device, config.precision.nbytes)
            source = f"published measurements of {config.device}"
            if not nearest and device_prior(config.device).name not in known:
                source = f"the data sheet of {config.device}"
                source += f" and measurements of {', '.join(known).upper()}" * bool(known)
            basis = f"from {source}, no run of yours" + f"; {nearest}" * bool(nearest)
            self._opened[device] = replace(machine, problems=self.assumed, basis=basis)
        return self._opened[device]


def unmeasured(
    device: str,
    *,
    config: Path | None = None,
    command: Sequence[str] = (),
    options: Sequence[str] = (),
    num_ranks: int = 0,
    cluster: Path | None = None,
    searching: Searching = quiet_search,
) -> Unmeasured:
    """Return the run that a file or command describes, on a device given by its short name.

    ``options`` are Megatron's and complete a ``config.json``, or a command that cannot be read
    without them; ``num_ranks``: 0 for the command's number.  Raises ``ConfigError`` if the run or
    its ranks are not described.
    """
    from ..options.config_files import OpenRun, completed, described_run
    from ..options.launch_scripts import inner_launch_line, launch_script, script_hint

    name = known_device(device).driver_name
    base: RunConfig | OpenRun = OpenRun(device=name, num_ranks=num_ranks)
    script, command = launch_script(command), inner_launch_line(command)
    try:
        described = described_run(config, command, base, num_ranks=num_ranks, script=script)
    except ConfigError:
        if not options:
            raise
        command = completed(command, options)
        described = described_run(config, command, base, num_ranks=num_ranks, script=script)
    if config is not None and described is not None:
        base = _with_options(described, options, num_ranks)
        described = described_run(config, command, base, num_ranks=num_ranks)
    if described is None:
        raise ConfigError(
            script_hint(options)
            or "without a directory the run has to be described; give its command after --, or "
            "--config FILE"
        )
    return Unmeasured(
        directory=Path(),
        cluster=cluster,
        searching=searching,
        described=replace(described.config, device=name),
        config_file=config,
        command=tuple(command),
        script=script,
        assumed=() if described.has_layout else _assumptions(described.config, options, num_ranks),
    )


def _assumptions(config: RunConfig, options: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """Return what the description of a model leaves open and nobody stated, as one note."""
    named = {option for option, _ in options_of(expand(options))}
    ranks, per_node = max(1, num_ranks), config.parallelism.ranks_per_node
    texts = {
        "1 GPU (--gpus N)": not num_ranks and "--data-parallel-size" not in named,
        "1 sample a step on each GPU (--gbs N)": "--global-batch-size" not in named,
        f"{config.model.seq_length:,} tokens a sample (--seq N)": "--seq-length" not in named,
        f"nodes of {per_node} GPUs": ranks > per_node,
    }
    assumed = ", ".join(text for text, is_open in texts.items() if is_open)
    return (f"assumed: {assumed}",) if assumed else ()


def _with_options(described: Described, options: Sequence[str], num_ranks: int) -> RunConfig:
    """Return the run with its options; of a model alone, on fewer ranks if replicas on all of them
    cannot share the batch."""
    try:
        return apply_options(described.config, options)
    except ConfigError:
        if described.has_layout:
            raise
    par, rest = described.config.parallelism, split_degrees(options)[1]
    one = replace(par, dp=1)
    batch = Batch(micro_batch_size=1, global_batch_size=1)
    alone = apply_options(replace(described.config, parallelism=one, batch=batch), rest)
    dp = math.gcd(max(1, num_ranks), alone.num_microbatches)
    return replace(alone, parallelism=replace(alone.parallelism, dp=dp))
