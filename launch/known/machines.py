"""The one door of the verbs to a step model: a calibrated run, or a machine that was imported.

A fit is kept beside the samples and read back while nothing that it stands on has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .kept_fits import KeptFit
from .kept_fits import Machine as Machine


def open_machine(
    directory: Path,
    *,
    run_id: str | None = None,
    machine: str | None = None,
    also: Sequence[Path] = (),
) -> Machine:
    """The step model of a directory: of its newest run, else of what was imported into it.

    ``also`` are directories whose runs and imported rows are evidence too.  Raises ``RecordError``
    where there is neither, ``ConfigError`` where imported machines have to be told apart.
    """
    kept = KeptFit(directory, question=(run_id, machine), also=also)
    found = kept.read()
    if found is None:
        from .machine_fits import fit_machine_of  # what reads and fits is slow to import

        found = fit_machine_of(directory, run_id=run_id, machine=machine, also=also)
        kept.write(found)
    return found
