"""What this rank records and whether it sends: the same answer on all ranks, without talking."""

from __future__ import annotations

from ...calib.workload.config import RunConfig
from ...calib.workload.recording import SMALL_WORLD, Recorded, RecordingPlan, recording_plan
from ..process.settings import Settings
from .exchange import Exchange


class RecordingRole:
    """Decided before the first hooked step; until then everything.  Small worlds send nothing."""

    def __init__(self, settings: Settings) -> None:
        self._rank = settings.rank
        self._config: RunConfig | None = None
        self._is_decided = False
        self.part = Recorded.OPERATORS
        self.exchange: Exchange | None = None
        if self._rank.world_size > SMALL_WORLD:
            folder = settings.directory / "records" / self._rank.run_id
            self.exchange = Exchange(self._rank, folder)

    def describe(self, config: RunConfig | None) -> None:
        """What is trained; a new description is decided on anew."""
        self._config, self._is_decided = config, False

    def decide(self, *, is_home: bool | None) -> RecordingPlan | None:
        """The plan where the writer has to know it, once; ``is_home`` as the host says."""
        if self._is_decided or self.exchange is None:
            return None
        self._is_decided = True
        layout = None if self._config is None else self._config.parallelism
        plan = recording_plan(self._rank.world_size, layout)
        self.part = plan.part(self._rank.rank)
        self.exchange.is_home = self._rank.is_last if is_home is None else is_home
        return plan
