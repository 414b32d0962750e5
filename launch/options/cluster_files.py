"""What a user states of the nodes of a cluster, in a JSON file: see docs/cluster.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...calib.errors import ConfigError
from ...calib.plain_json import parse_json
from ...calib.records import KEYS, StatedNodes, stated_nodes

_MOST_NBYTES = 1 << 16


def read_cluster(path: Path | None) -> StatedNodes | None:
    """What the file states; None where no file is given.

    ``ConfigError`` with the file's name where it is not there, is no JSON object, or says what
    cannot be.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_NBYTES + 1)
    except OSError as err:
        raise ConfigError(
            f"{path} cannot be read: {err.strerror or err}; give a JSON file"
        ) from err
    if len(text) > _MOST_NBYTES:
        raise ConfigError(f"{path} is larger than 64 KiB; a cluster file has a few lines")
    try:
        found = parse_json(text)
    except ValueError as err:
        raise ConfigError(f"{path} is not JSON: {err}; correct it") from err
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; give one with any of {', '.join(KEYS)}")
    try:
        return stated_nodes(found)
    except ConfigError as err:
        raise ConfigError(f"{path}: {err}") from err


def add_cluster(add: Callable[..., object], of: str = "") -> None:
    """The option for such a file, ``of`` some questions alone."""
    add(
        "--cluster",
        type=Path,
        metavar="FILE",
        help=f"{of}JSON of what joins the GPUs (joint, num_gpus, num_cards, domain, "
        "node_bytes_per_s, card_bytes_per_s): docs/cluster.md",
    )
