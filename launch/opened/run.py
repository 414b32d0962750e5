"""A calibrated run: ``forerun.load(DIR)``.  Nothing is read, fitted or imported before it is asked.

Its methods are those of the verbs, which ask them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.errors import CalibrationError, ForerunError, RecordError
from ..directory.run_folders import object_of_run, top_of
from .other_run import OtherRun
from .told import Told

if TYPE_CHECKING:
    import pandas as pd

    from ...calib.arguments import AxisValue
    from ...calib.search import Effort
    from ..known.machines import Machine
    from ..known.runs import Loaded
    from ..options.plan_options import Several
    from ..report.table import ReportTable
    from .explained import ExplainAnswer, Named
    from .layout import Layout, Model
    from .planned import PlanAnswer, Searching
    from .predicted import Options, Prediction
    from .reported import ReportAnswer
    from .said import RunDecision, RunForecast


@contextmanager
def quiet_search(top: int) -> Iterator[Effort]:
    """The effort of a search that takes one processor and says nothing."""
    from ...calib.search import Effort

    yield Effort(top=top)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Run(Told):
    """A calibrated run as it was when it was first asked; load it again for what came later."""

    directory: Path
    """What ``--calibrate-dir`` was."""
    asked_run_id: str | None = None
    """None: the newest."""
    asked_machine: str | None = None
    """Of imported steps; None: the only one."""
    also: tuple[Path, ...] = ()
    """Directories whose measured steps count too."""
    like: Path | None = None
    """Of another machine's run, for operators that this one has not timed."""
    device: str | None = None
    """Another device than the run's own."""
    cluster: Path | None = None
    """A file that says what joins the GPUs."""
    searching: Searching = quiet_search
    """How a plan is searched for: what it says meanwhile, and on how many processors."""
    _opened: dict[str | None, Machine] = field(default_factory=dict, init=False)
    """By device; None: the run's own."""

    @cached_property
    def run_id(self) -> str:
        """The run, or the machine that was imported."""
        if self.asked_run_id is not None:
            return self.asked_run_id
        from ..known.runs import has_run, newest_run_id

        if self.asked_machine is None and has_run(self.directory):
            return newest_run_id(self.directory) or self._loaded.table.run_id
        return self.machine().name

    @cached_property
    def forecast(self) -> RunForecast:
        """When it ends, as the run said last; without such a file as the report has it.

        Raises ``CalibrationError`` where nobody knows how many steps it has.
        """
        from ...hooks.process import FORECAST
        from ..directory.forecast_log import end_of_run
        from .said import RunForecast

        value = self._said(FORECAST) or self.report().to_json()["forecast"]
        if reason := value.get("reason_no_finish"):
            raise CalibrationError(f"run {self.run_id!r} has no forecast of its end: {reason}")
        ended = end_of_run(top_of(self.directory)[0], self.run_id)
        return RunForecast.of({**value, "run_id": self.run_id}, ended_unix_s=ended)

    @cached_property
    def decision(self) -> RunDecision:
        """What is advised, as the run said last; without such a file as the report has it."""
        from .said import RunDecision

        value = self._said("decision.json") or self.report().to_json()["decision"]
        return RunDecision.of({**value, "run_id": self.run_id})

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
        """The step of another layout: ``run.predict(tp=4, mbs=2)``.

        ``layout`` are short names (``run.layout`` shows all); ``options`` are Megatron's own, as
        words or by name.  ``config`` (Megatron's arguments, a Hugging Face ``config.json``, a
        checkpoint) or ``command`` describe another run over this calibration; ``anyway`` answers
        where an option of it is not modelled, ``assume_no_effect`` names options of the script's
        own that change neither time nor memory.  ``tokens`` (``"1T"``) and ``price_per_gpu_hour``
        ask for the whole run too (``Prediction.whole_run``).

        Raises ``ConfigError`` for a name that is not known and a layout that cannot be, and
        ``CalibrationError`` where the layout of the run is not known.
        """
        from .predicted import predicted, words_of

        words = words_of(options, layout)
        other = self._other(config, command, anyway, assume_no_effect)
        found = predicted(self.machine(), words, other, self.machine, self.directory)
        return found.to_tokens(tokens, price_per_gpu_hour)

    def plan(
        self,
        *,
        gpus: Several = None,
        gpus_per_node: int | str | None = None,
        device: Several = None,
        global_batch_size: int | str | None = None,
        seq_length: int | str | None = None,
        memory_gib: float | str | None = None,
        objective: str = "time",
        price_per_gpu_hour: Several = None,
        tokens: float | str | None = None,
        keep: str | Mapping[str, Any] | None = None,
        why: str | Mapping[str, Any] | None = None,
        top: int | str = 10,
        config: Path | str | None = None,
        command: Sequence[str] = (),
        anyway: bool = False,
        assume_no_effect: Sequence[str] = (),
        num_rows: int = 0,
    ) -> PlanAnswer:
        """The best layouts: ``run.plan(gpus=64)``, ``run.plan(gpus="8..1024", keep={"tp": 8})``.

        ``gpus`` is a number, several, or ``"8..1024"``; ``device`` one or several by name;
        ``global_batch_size`` samples, or ``"xGPUS"``; ``keep`` and ``why`` values of short names.
        All else is as the options of ``forerun plan`` (docs/plan.md); ``num_rows``: so many are
        searched for at least, whatever ``top`` shows.

        Raises ``ConfigError`` for what has no meaning, and where no layout runs.
        """
        from ..options.plan_options import read_question
        from .planned import planned

        question = read_question(
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            device=self.device if device is None else device,
            global_batch_size=global_batch_size,
            seq_length=seq_length,
            memory_gib=memory_gib,
            objective=objective,
            price_per_gpu_hour=price_per_gpu_hour,
            tokens=tokens,
            keep=keep,
            why=why,
            top=top,
        )
        other = self._other(config, command, anyway, assume_no_effect)
        return planned(self.machine, self.directory, question, other, self.searching, num_rows)

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
        """Why a layout takes what it takes; with another, why not as long as that one's.

        A layout is named as a plan prints it (``"TP4 PP2 DP2 mbs2"``), as a change of the running
        one (``"tp4 pp2"``), as ``"running"``, by its row in the plan, or is one that an answer
        holds.  ``gpus``: ranks of both (default: as the run).

        Raises ``ConfigError`` for a name that is none and a layout that cannot run.
        """
        from .explained import explained

        described = self._other(config, command, anyway, assume_no_effect)
        return explained(self.machine, layout, other, gpus, described, self.searching)

    def report(self) -> ReportAnswer:
        """All that its records say, analysed anew.

        Raises ``CalibrationError`` where too few steps are recorded.
        """
        return self._report

    @property
    def samples(self) -> pd.DataFrame:
        """Times of operators and transfers, one row for each of a window: docs/python.md."""
        return self._loaded.table.samples.copy()

    @property
    def steps(self) -> pd.DataFrame:
        """Its steps, one row each, beside what was predicted of them: docs/python.md."""
        from ..directory.forecast_log import forecasts_of
        from ..directory.run_log import read_steps
        from .step_frame import step_frame

        table, (top, _) = self._loaded.table, top_of(self.directory)
        made = forecasts_of(top, table.run_id)
        return step_frame(table, made, read_steps(top, table.run_id))

    @cached_property
    def layout(self) -> Layout:
        """The layout that it runs in."""
        from .layout import Layout

        return Layout.of(self.machine().own)

    @cached_property
    def model(self) -> Model:
        """The sizes of the model that it trains."""
        from .layout import Model

        return Model.of(self.machine().own.model)

    def machine(self, device: str | None = None) -> Machine:
        """The step model, on the device that was asked for, on another, or on the run's own.

        A device that the run was on, by a short name or its own, is the run's own.  See
        ``open_machine`` for what is raised.
        """
        from ...calib.fit.priors import UNKNOWN_DEVICE, device_prior
        from ...calib.memory import known_device

        device = self.device if device is None else device
        if device is None:
            return self._open(None)
        wanted = known_device(device).driver_name
        try:
            own = self._open(None)
        except ForerunError:  # Probes alone answer for other devices, not for a run of their own.
            return self._open(wanted)
        here = device_prior(own.own.device).name
        is_own = here != UNKNOWN_DEVICE and here == device_prior(wanted).name
        return own if is_own or own.own.device == wanted else self._open(wanted)

    def to_json(self) -> dict[str, Any]:
        """Which run it is, and what it was loaded with."""
        from ...calib.records import stamped

        return stamped({"run_id": self.run_id, "directory": str(self.directory)})

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, run_id={self.run_id!r})"

    def parts(self) -> Iterator[ReportTable | str]:
        """Which run it is, and what it says of itself so far."""
        yield f"run {self.run_id} in {self.directory}"
        for say in (lambda: self.forecast, lambda: self.decision):
            try:
                yield say().sentence
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
        from .reported import reported

        return reported(self.directory, self._loaded)

    def _said(self, name: str) -> dict[str, Any] | None:
        """A file of this run; None where there is none that can be read."""
        top, own = top_of(self.directory)
        try:
            return object_of_run(self.directory if own else top, name, self.run_id)
        except RecordError:
            return None

    def _other(
        self,
        config: Path | str | None,
        command: Sequence[str],
        anyway: bool,
        assume_no_effect: Sequence[str],
    ) -> OtherRun:
        from ..options.config_files import line_inside

        return OtherRun(
            config=None if config is None else Path(config),
            command=line_inside(command),
            is_any_answer=anyway,
            without_effect=tuple(assume_no_effect),
        )
