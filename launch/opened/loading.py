"""The run of a directory, or a described run on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...calib.errors import ConfigError, RecordError
from ..directory.run_folders import SAMPLES, top_of
from .run import Run, quiet_search
from .unmeasured import unmeasured

if TYPE_CHECKING:
    from .planned import Searching

_HELD = ("records/*/*", SAMPLES, f"runs/*/{SAMPLES}", "imported/*.csv")
"""Any of these, and there is something to ask."""


def load(
    directory: Path | str | None = None,
    *,
    run_id: str | None = None,
    machine: str | None = None,
    also: Sequence[Path | str] = (),
    like: Path | str | None = None,
    device: str | None = None,
    cluster: Path | str | None = None,
    config: Path | str | None = None,
    command: Sequence[str] | str = (),
    searching: Searching = quiet_search,
) -> Run:
    """The run of a directory, or one launch's folder in it; nothing of it is read yet.

    Without a directory, ``load(device="H100", command="torchrun ...")`` is that run on a device by
    what was published of it; ``config`` may describe it in place of ``command``.

    ``run_id``: which run (default: the newest); ``machine``: which machine of imported steps;
    ``also``: directories whose measured steps count too; ``like``: a run of another machine whose
    operators are carried over; ``device``: another device, as H100; ``cluster``: a JSON file of
    what joins the GPUs (docs/cluster.md); ``searching``: how plans are searched.

    Raises ``RecordError`` where the directory holds neither records nor tables.
    """
    config, cluster = (None if one is None else Path(one) for one in (config, cluster))
    words = ("bash", "-c", command) if isinstance(command, str) and command else command
    if directory is None and device is not None:
        return unmeasured(
            device, config=config, command=words, cluster=cluster, searching=searching
        )
    if directory is None or config is not None or words:
        raise ConfigError(
            "load() takes a directory, or a device and a command or a config; give a command over "
            "a directory to predict or plan"
        )
    home = Path(directory)
    top, _ = top_of(home)
    if not any(next(place.glob(held), None) for place in {home, top} for held in _HELD):
        raise RecordError(
            f"{home} has neither records nor {SAMPLES}; train with --calibrate "
            f"--calibrate-dir={home} first"
        )
    return Run(
        directory=home,
        asked_run_id=run_id,
        asked_machine=machine,
        also=tuple(map(Path, also)),
        like=None if like is None else Path(like),
        device=device,
        cluster=cluster,
        searching=searching,
    )
