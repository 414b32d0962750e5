"""The one door of the verbs to a step model: a calibrated run, or a machine that was imported.

A fit is cached beside the samples and read back while nothing that it stands on has changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from ...calib.errors import ConfigError
from ...calib.records import StatedNodes
from ...hooks.process import missing_packages_message
from ..store import DAMAGE_ERRORS, CachedFile, pack_model, unpack_model
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
    """The step model of a directory: of its newest run, else of what was imported into it.

    ``also`` are directories whose runs and imported rows are evidence too; operators of the run in
    ``like``, maybe of another device, are carried over to this one's, and with ``device`` those of
    this run to a device that nothing was measured on.  ``stated`` is said of the nodes, over what
    the run saw and was told of them.  Raises ``RecordError`` where there is neither, and
    ``ConfigError`` where machines have to be told apart or a fit needs packages that are missing.
    """
    nodes = None if stated is None else json.dumps(stated.values, sort_keys=True)
    question = (run_id, machine, None if like is None else str(like.absolute()), device, nodes)
    read = (*also, like) if like is not None else also
    cached = CachedFile("fit-*.npz", question, directory, *read)
    fitted = _read(cached)
    if fitted is None:
        if lacking := missing_packages_message("a fit"):
            raise ConfigError(lacking)
        from .machine_fits import fit_machine  # what reads and fits is slow to import

        fitted = fit_machine(directory, run_id, machine, also, like, device, stated)
        with suppress(TypeError):  # it holds what no file does
            values = {one.name: getattr(fitted, one.name) for one in fields(fitted)}
            cached.write(pack_model(values))
    return replace(fitted, running=with_program(fitted.running, directory, fitted.name))


def _read(cached: CachedFile) -> Machine | None:
    """A cached fit; None where there is none, or it is damaged or of another version."""
    body = cached.read()
    with suppress(*DAMAGE_ERRORS):
        return Machine(**unpack_model(body)) if body else None
    return None
