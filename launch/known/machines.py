"""Entry point of the verbs to a step model, of a calibrated run or an imported machine.

A fit is cached next to the samples and reused while nothing that it depends on has changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from ...calib.errors import ConfigError
from ...calib.records.cluster import StatedNodes
from ...hooks.process.interpreter import missing_packages_message
from ..store.cached_file import CachedFile
from ..store.model_archive import DAMAGE_ERRORS, pack_model, unpack_model
from .machine import Machine as Machine
from .machine import with_program


def open_machine(
    directory: Path,
    *,
    run_id: str | None = None,
    machine: str | None = None,
    also: Sequence[Path] = (),
    like: Path | None = None,
    device: str | None = None,
    stated: StatedNodes | None = None,
) -> Machine:
    """Return the machine of a directory: of its newest run, else of its imported tables.

    ``also`` are directories whose runs and imported rows are further evidence.  Operators of the
    run in ``like``, maybe on another device, are transferred to this run's device; with ``device``,
    those of this run are transferred to an unmeasured device.  ``stated`` describes the nodes and
    overrides what the run detected or stated.  Raises ``RecordError`` if there is neither run nor
    import, and ``ConfigError`` if the machine is ambiguous or packages for a fit are missing.
    """
    nodes = None if stated is None else json.dumps(stated.values, sort_keys=True)
    question = (run_id, machine, None if like is None else str(like.absolute()), device, nodes)
    read = (*also, like) if like is not None else also
    cached = CachedFile("fit-*.npz", question, directory, *read)
    fitted = _read(cached)
    if fitted is None:
        if lacking := missing_packages_message("a fit"):
            raise ConfigError(lacking)
        from .machine_fits import fit_machine  # slow to import

        fitted = fit_machine(directory, run_id, machine, also, like, device, stated)
        with suppress(TypeError):  # not everything can be stored in a file
            values = {one.name: getattr(fitted, one.name) for one in fields(fitted)}
            cached.write(pack_model(values))
    return replace(fitted, running=with_program(fitted.running, directory, fitted.name))


def _read(cached: CachedFile) -> Machine | None:
    """Return a cached fit; None if there is none, or it is damaged or of another version."""
    body = cached.read()
    with suppress(*DAMAGE_ERRORS):
        return Machine(**unpack_model(body)) if body else None
    return None
