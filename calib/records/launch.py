"""How a run was launched: what rank 0 noted of its command, host and environment.

Only what may be kept is here (``calib.arguments.kept_arguments``); a masked word is ``***``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import ConfigError, RecordError
from ..plain_json import Json
from ..shell import is_word
from ..workload.config_json import Encoded, decode

NAME = "command.json"
"""The file of rank 0, in the folder of a run's records."""
RUNS = "runs"
"""The folder of a directory that holds one folder for each launch."""
LAUNCH = "launch.json"
"""In such a folder: of which launch it is, or which one its launch has agreed to be."""
MARKER = "stop.json"
"""In such a folder: that, when and why training was asked to save and stop."""
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Encoded):
    """A launch in words; empty where nothing was noted."""

    JSON: ClassVar[str] = "schema *"
    schema: ClassVar[int] = SCHEMA

    argv: tuple[str, ...] = ()
    """The program and its arguments, ours left out."""
    launcher: tuple[str, ...] = ()
    """The words before the program, as ``torchrun --nproc-per-node 8``; empty: not known."""
    folder: str = ""
    """The working directory."""
    host: str = ""
    """Whose loop trains, where a module tells (``megatron.bridge``); empty: the config tells."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    absent: tuple[str, ...] = ()
    """Options of layouts that the program does not take, and ``transformer_engine`` where that was
    not imported (``RunConfig.absent``)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that Megatron's rules ask for, and our own, as the processes had them."""

    @staticmethod
    def from_json(value: Mapping[str, Json]) -> Launch:
        """The launch that ``to_json`` wrote; unknown keys are ignored.

        Raises ``RecordError`` where a value is of another kind, or no word of a command.

        >>> Launch.from_json(Launch(argv=("t.py", "--lr", "1")).to_json()).argv
        ('t.py', '--lr', '1')
        """
        try:
            found = decode(Launch, value)
        except ConfigError as err:
            raise RecordError(f"{NAME} cannot be read ({err}); delete it") from err
        if not all(map(is_word, (*found.argv, *found.launcher, found.folder))):
            raise RecordError(f"{NAME} has words that no process was given; delete it")
        return found
