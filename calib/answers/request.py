"""What is asked of an analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..arguments import kept_arguments, program_of
from ..errors import ConfigError, RecordError
from ..forecast import RunProgress
from ..workload import Encoded, RunConfig, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(RunProgress, Encoded):
    """What is asked of an analysis; everything that it cannot read from the table."""

    JSON: ClassVar[str] = "* -goals **goals"

    host_argv: tuple[str, ...] = ()
    """Only what may be kept: the rest is masked, since the request is written to a file."""
    absent: tuple[str, ...] = ()
    """What the program lacks (``RunConfig.absent``)."""
    memory_capacity_nbytes: int | None = None
    previously_met: tuple[str, ...] = ()
    """Values of the rules that spoke for stopping in the window before."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_argv", kept_arguments(self.host_argv))

    def of_program(self, config: RunConfig) -> RunConfig:
        """The layout with the name of the program that trains it, and what that lacks."""
        return replace(config, program=program_of(self.host_argv), absent=self.absent)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Request:
        """The request that ``to_json`` wrote; unknown keys are ignored.

        Raises ``RecordError`` where a value is of another kind, or no finite number.
        """
        try:
            return decode(Request, {**value, "goals": value})
        except ConfigError as err:
            raise RecordError(
                f"the request cannot be read ({err}); delete request.json, and the records are "
                "analysed again"
            ) from err
