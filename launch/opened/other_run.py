"""Another run over the same calibration: by a file of arguments, or by its command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...calib.workload.config import RunConfig
    from ..known.kept_fits import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """What describes it; nothing: the run itself is meant."""

    config: Path | None = None
    command: tuple[str, ...] = ()

    def of(self, machine: Machine, num_ranks: int) -> tuple[RunConfig, tuple[str, ...]]:
        """The described run on so many ranks (0: as it says) and on the machine's device, and what
        of it was left out, in words; the machine's own run where nothing describes another.

        Raises ``ConfigError`` where a command does not say its ranks and those of a table, which
        are of other runs, are all that is known.
        """
        own = machine.own
        if self.config is None and not self.command:
            return own, ()
        from ..options.config_files import described_run  # no other question needs such files

        is_run = machine.steps.base.conditions.is_in_situ
        found = described_run(
            self.config,
            self.command,
            own,
            num_ranks=num_ranks,
            usual_ranks=own.parallelism.num_ranks if is_run else 0,
        )
        if found is None:
            return own, ()
        left_out = {
            "not known and ignored": found.unknown,
            "left out by the model": found.config.unmodelled,
        }
        told = (f"{what}: {', '.join(names)}" for what, names in left_out.items() if names)
        config = replace(found.config, device=own.device, framework=own.framework)
        return config, (*found.notes, *told)
