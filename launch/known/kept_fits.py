"""What the verbs know of a machine, and how it is kept beside the samples that it stands on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from ...calib.answers import plain_models
from ...calib.errors import ForerunError
from ...calib.steps.model import FittedSteps
from ...calib.workload.config import RunConfig
from .kept_files import KeptFile

_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, ImportError, ForerunError),
)
"""What making data classes of a damaged value, or of one of another version, may raise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a directory says of the steps of any layout."""

    name: str
    """The run, or the machine that was imported."""
    own: RunConfig
    """The layout that others are held against."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None
    """What a measured peak had beyond its estimate; None where none was measured."""
    is_elsewhere: bool = False
    """True where nothing was measured on its device; ``own`` is the run as it would be there."""
    problems: tuple[str, ...] = ()
    basis: str = ""
    """The source of its times, in words, where no run of the user was measured; else empty."""

    def runs(self, config: RunConfig) -> bool:
        """True where a layout does the work of the run on this machine, so that both times may be
        compared."""
        return not self.is_elsewhere and config.does_work_of(self.own)


class KeptFit:
    """The fit of one question to a directory, as it is there now."""

    def __init__(
        self, directory: Path, *, question: tuple[str | None, ...], also: Sequence[Path]
    ) -> None:
        self._kept = KeptFile(directory, "fitted", question=question, also=also)

    def read(self) -> Machine | None:
        """What was kept; None where there is nothing that holds, or it makes no model."""
        body = self._kept.read()
        if body is None:
            return None
        try:
            return Machine(**plain_models.made(json.loads(body)))
        except _DAMAGED:
            return None

    def write(self, machine: Machine) -> None:
        """Keep a fit, but not one that holds what has no plain form."""
        with suppress(TypeError):
            values = {one.name: getattr(machine, one.name) for one in fields(machine)}
            self._kept.write(json.dumps(plain_models.plain(values)).encode())
