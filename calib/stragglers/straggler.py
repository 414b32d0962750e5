"""A rank, or a group with a slow link, that holds the others up, and all of them in one report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from ..plain_json import Json, JsonObject


class StragglerKind(Enum):
    """Where the time goes."""

    COMPUTE = "compute"
    DATA = "data"
    HOST = "host"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank, or the ranks of a group with a slow link, that stands out from its peers.

    Times are per step: ``excess_s`` beyond the median of the peers, ``cost_s`` what the step would
    gain if it were as fast as the next, within ``low_s`` and ``high_s`` (90 %).
    """

    ranks: tuple[int, ...]
    stage: int
    role: str
    kind: StragglerKind
    excess_s: float
    cost_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReport:
    """Who stands out, the costliest first; ``reason`` says why none does."""

    slow: tuple[Straggler, ...] = ()
    cost_s: float = 0.0
    """What the step would gain if all of them were as fast as the rest."""
    num_ranks: int = 0
    """Ranks that were compared."""
    reason: str = ""

    def to_json(self) -> JsonObject:
        """A JSON object."""
        rows: list[Json] = [
            {**asdict(s), "kind": s.kind.value, "ranks": list(s.ranks)} for s in self.slow
        ]
        return {**asdict(self), "slow": rows}
