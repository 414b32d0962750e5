"""The arguments inside a Megatron checkpoint, read without running anything that it holds.

torch's ``weights_only`` unpickler builds only what it is told to; classes of Megatron are replaced
by inert ones of the same name, and a checkpoint that needs any other class is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...calib.errors import ConfigError

_PLACES = ("common.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_optim_rng.pt")
_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
"""Members of core's ``AttnBackend``, which a pickle keeps by number."""


class _Inert:
    """Stands for an object of Megatron; keeps what it would have been made of."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __str__(self) -> str:
        first: Any = self.args[0] if self.args else ""
        is_backend = type(self).__name__ == "AttnBackend"
        return _BACKENDS.get(first, "auto") if is_backend else str(first)


def checkpoint_arguments(path: Path) -> Mapping[str, Any]:
    """Names and values of ``args`` in a checkpoint file or in the directory of one iteration.

    Raises ``ConfigError`` where torch is not installed, the file is none of Megatron's, or it
    needs a class that is not Megatron's.
    """
    file = next((path / p for p in _PLACES if (path / p).exists()), path)
    try:
        import torch
        from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
    except ImportError as err:
        raise ConfigError(f"{file} needs torch to be read; install it, or give YAML") from err
    try:
        allowed = [_stand_in(file, name) for name in get_unsafe_globals_in_checkpoint(str(file))]
        with safe_globals(allowed):
            value = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except ConfigError:
        raise
    except Exception as err:
        line = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ConfigError(f"{file} is not a checkpoint: {line}; give one of Megatron") from err
    args = value.get("args") if isinstance(value, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise ConfigError(f"{file} holds no args; give a checkpoint of Megatron-LM")
    return vars(args)


def _stand_in(file: Path, name: str) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    if name.startswith(("megatron.", "signal.")):
        return type(name.rpartition(".")[2], (_Inert,), {}), name
    raise ConfigError(
        f"{file} needs {name}, which is not a class of Megatron and is not loaded; "
        f"give the arguments as YAML"
    )
