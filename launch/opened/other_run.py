"""Another run over the same calibration: by a file of arguments, or by its command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...calib.workload.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """What describes it; nothing: the run itself is meant."""

    config: Path | None = None
    command: tuple[str, ...] = ()

    def of(self, own: RunConfig, num_ranks: int) -> tuple[RunConfig, tuple[str, ...]]:
        """The described run on so many ranks (0: as it says) and on the device of ``own``, and what
        of it was left out, in words; ``own`` where nothing describes another."""
        if self.config is None and not self.command:
            return own, ()
        from ..options.config_files import described_run  # no other question needs such files

        found = described_run(self.config, self.command, own, num_ranks=num_ranks)
        if found is None:
            return own, ()
        left_out = {
            "not known and ignored": found.unknown,
            "left out by the model": found.config.unmodelled,
        }
        told = (f"{what}: {', '.join(names)}" for what, names in left_out.items() if names)
        config = replace(found.config, device=own.device, framework=own.framework)
        return config, (*found.notes, *told)
