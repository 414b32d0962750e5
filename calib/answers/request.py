"""The request to an analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments.passed_on import masked_arguments
from ..errors import ConfigError, RecordError
from ..forecast.remaining_run import RunProgress
from ..plain_json import JsonObject
from ..workload.config_json import Encoded, decode, encode_fields, encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(RunProgress, Encoded):
    """Inputs of an analysis that are not in the sample table."""

    host_argv: tuple[str, ...] = ()
    """Command line, with sensitive values masked, since the request is written to a file."""
    absent: tuple[str, ...] = ()
    """Options that the program lacks (``RunConfig.absent``)."""
    memory_capacity_nbytes: int | None = None
    previously_met: tuple[str, ...] = ()
    """Values of the rules that were met in the previous window."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(**encode_fields(self, "goals"), **encode_fields(self.goals))

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_argv", masked_arguments(self.host_argv))

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Request:
        """Return the request that ``to_json`` wrote; unknown keys are ignored.

        Raises ``RecordError`` if a value has the wrong type or is not finite.
        """
        try:
            return decode(Request, {**value, "goals": value})
        except ConfigError as err:
            raise RecordError(
                f"the request cannot be read ({err}); delete request.json, and the records are "
                "analysed again"
            ) from err
