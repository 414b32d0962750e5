"""Comparison of two runs from their sample tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ..answers.run_measurements import Measurements
from ..drift.attribution import find_causes
from ..drift.stragglers import waiting_report
from ..errors import CalibrationError
from ..forecast.modelled import batch_size_at
from ..samples.table import SampleTable, newest_window
from ..steps.known_steps import same_layout
from ..workload.config import RunConfig
from ..workload.model_shape import ModelShape
from ._settings import Part, SettingChange, setting_changes, settings_of, work_of
from .levels import (
    Basis,
    Difference,
    Floats,
    Level,
    Side,
    TermChange,
    compare_levels,
    estimate_repeat_sigma_log,
    log_level,
)
from .terms import (
    ALL_ELSE,
    Scatter,
    rank_scatter,
    rank_windows,
    step_windows,
    term_scatter,
    term_windows,
)

MOST_RANKS = 16
"""Number of largest changes of single ranks that are reported."""


def difference(first: SampleTable, second: SampleTable) -> Difference:
    """Compare the newest run of the second table with that of the first, over all their windows.

    Both may be windows of one run.  Raises ``CalibrationError`` if one has no clean step.
    """
    ours, theirs = _Run(first), _Run(second)
    is_one_run = first.run_id == second.run_id
    repeat_sigma_log = max(run.repeat_sigma_log(is_one_run=is_one_run) for run in (ours, theirs))
    changes = setting_changes(ours.settings, theirs.settings)
    is_alike = work_of(ours.settings) == work_of(theirs.settings)
    per_tokens = 0 if ours.tokens_per_step == theirs.tokens_per_step else 1000
    step = compare_levels(ours.level(repeat_sigma_log), theirs.level(repeat_sigma_log))
    answer = Difference(
        first=ours.side(),
        second=theirs.side(),
        settings=changes,
        basis=Basis.STEP_TIME if is_alike else Basis.THROUGHPUT,
        reason=_reason(ours, theirs, changes),
        step=step,
        terms=_terms(
            ours.terms(per_tokens, repeat_sigma_log), theirs.terms(per_tokens, repeat_sigma_log)
        ),
        per_tokens=per_tokens,
        ranks=_ranks(ours, theirs, repeat_sigma_log) if is_alike else (),
        causes=(),
    )
    if not (is_alike and step.is_shown):
        return answer
    moved_s = answer.second.step_time_s - answer.first.step_time_s
    before, after = _as_one_window(first), _as_one_window(second)
    why = find_causes(before, after, change_s=moved_s, step_s=answer.first.step_time_s)
    return replace(answer, causes=why)


class _Run:
    """The newest run of a table, by window."""

    def __init__(self, table: SampleTable) -> None:
        self.measured = Measurements(table=table)
        self.settings = settings_of(self.measured)
        self.config = self.measured.config if table.is_described else None
        self._windows = step_windows(table)
        if not self._windows:
            raise CalibrationError(
                f"run {table.run_id!r} has no clean step in these windows; record more steps"
            )
        self._tokens = {w: self._tokens_of(part) for w, part in self._windows.items()}

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of all ranks; 0 if unknown."""
        known = self.config
        return known.batch.global_batch_size * known.model.seq_length if known else 0

    def _tokens_of(self, part: pd.DataFrame) -> float:
        """Return the tokens per step of one window, which a ramp changes; 1 if unknown."""
        if self.config is None:
            return 1.0
        config = self.measured.recorded_config
        size = batch_size_at(config, int(part["step"].median()) + 1)
        return float(size * config.model.seq_length)

    def _per_token_s(self) -> list[Floats]:
        """Return seconds per token of the steps of each window."""
        return [
            part["time_s"].to_numpy(dtype=np.float64) / self._tokens[window]
            for window, part in self._windows.items()
        ]

    def repeat_sigma_log(self, *, is_one_run: bool) -> float:
        """Return the standard deviation of the log step between repeated runs."""
        return estimate_repeat_sigma_log(
            self._per_token_s(), self.measured.device, is_one_run=is_one_run
        )

    def level(self, repeat_sigma_log: float) -> Level:
        """Return the level of the logarithm of seconds per token."""
        return log_level(self._per_token_s(), repeat_sigma_log=repeat_sigma_log)

    def side(self) -> Side:
        """Return the description of the run on its own."""
        per_token_s = math.exp(self.level(0.0).mean)
        tokens = self.tokens_per_step
        step_s = per_token_s * (tokens or 1)
        return Side(
            run_id=self.measured.run_id,
            windows=tuple(self._windows),
            num_steps=sum(map(len, self._windows.values())),
            num_ranks=self.measured.run.num_ranks,
            device=self.measured.device,
            step_time_s=step_s,
            tokens_per_s=1.0 / per_token_s if tokens else None,
            slow=waiting_report(self.measured.table, step_s).line,
        )

    def terms(self, per_tokens: int, repeat_sigma_log: float) -> Mapping[str, Level]:
        """Return the level of each term in seconds."""
        frame = term_windows(self.measured.table)
        scatter = term_scatter(self.measured.table, frame) if len(frame) == 1 else {}
        each = [per_tokens / self._tokens[w] if per_tokens else 1.0 for w in frame.index]
        frame = frame.mul(each, axis=0)
        return {str(n): _level(frame[n], repeat_sigma_log, scatter.get(str(n))) for n in frame}

    def ranks(self, repeat_sigma_log: float) -> Mapping[tuple[int, str], Level]:
        """Return levels of work and waiting of each rank in seconds."""
        frames = rank_windows(self.measured.table)
        is_one = len(self._windows) == 1
        scatter = rank_scatter(self.measured.table) if is_one else {}
        return {
            (rank, name): _level(frame[name], repeat_sigma_log, scatter.get(rank, {}).get(name))
            for rank, frame in frames.items()
            for name in ("work", "waiting")
        }


def _reason(first: _Run, second: _Run, changes: tuple[SettingChange, ...]) -> str:
    ours, theirs = first.config, second.config
    if (ours is None) is not (theirs is None):
        return "the model of only one of the runs is known"
    if ours and theirs and _unlengthened(ours) != _unlengthened(theirs):
        texts = [one.text for one in changes if one.part is Part.MODEL]
        return f"another model (B has {', '.join(texts[:2])})"
    return ""


def _unlengthened(config: RunConfig) -> ModelShape:
    """Return the model without its sequence length."""
    return replace(same_layout(config).model, seq_length=1, max_position_embeddings=0)


def _level(values: pd.Series, repeat_sigma_log: float, scatter: Scatter | None) -> Level:
    """Return the level of seconds by window; a single one without scatter has 100 % error."""
    known = tuple(values.to_numpy(dtype=np.float64).tolist())
    size = abs(float(np.mean(known)))
    level = Level(values=known, repeat_sigma=repeat_sigma_log * size)
    if len(known) > 1:
        return level
    if scatter is None:
        return replace(level, noise=size)
    error_frac, freedom = scatter
    return replace(level, noise=size * error_frac, noise_freedom=freedom)


def _terms(first: Mapping[str, Level], second: Mapping[str, Level]) -> tuple[TermChange, ...]:
    names = [n for n in dict.fromkeys((*first, *second)) if n != ALL_ELSE]
    terms = []
    for name in (*names, ALL_ELSE):
        ours, theirs = (
            side.get(name) or Level(values=(0.0,) * len(side[ALL_ELSE].values), repeat_sigma=0.0)
            for side in (first, second)
        )
        terms.append(_term(name, ours, theirs, len(names) + 1))
    return tuple(terms)


def _term(name: str, ours: Level, theirs: Level, num_compared: int) -> TermChange:
    term_change = compare_levels(ours, theirs, num_compared=num_compared)
    return TermChange(name=name, first_s=ours.mean, second_s=theirs.mean, change=term_change)


def _ranks(first: _Run, second: _Run, repeat_sigma_log: float) -> tuple[TermChange, ...]:
    """Return significant changes of single ranks, largest first."""
    ours, theirs = first.ranks(repeat_sigma_log), second.ranks(repeat_sigma_log)
    both = sorted(ours.keys() & theirs.keys())
    text = {"work": "own work", "waiting": "waiting"}
    terms = [
        _term(f"rank {rank} {text[name]}", ours[rank, name], theirs[rank, name], len(both))
        for rank, name in both
    ]
    shown = [term for term in terms if term.change.is_shown]
    return tuple(sorted(shown, key=lambda term: -abs(term.change.value))[:MOST_RANKS])


def _as_one_window(table: SampleTable) -> SampleTable:
    """Return the table with all steps of the run as one window, and links of its newest."""
    return replace(
        table,
        steps=table.newest("steps").assign(window=0),
        phases=table.newest("phases").assign(window=0),
        links=newest_window(table.newest("links")),
    )
