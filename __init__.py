"""Forerun: calibrates itself on the first steps of a training run, then forecasts the rest.

The names below are resolved on first use, so that ``import forerun`` loads neither numpy nor torch.
"""

from __future__ import annotations

# Without typing: ``python -m forerun`` still has the working directory on its path here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .calib.errors import ForerunError
    from .calib.workload.config import RunConfig
    from .hooks.adapters.bridge import bridge_callback
    from .hooks.adapters.hugging_face import hugging_face_callback
    from .hooks.adapters.lightning import lightning_callback
    from .hooks.process.stopping import should_stop
    from .hooks.session.attaching import attach
    from .launch.opened.run import Run, load

__version__ = "0.1.0"
__all__ = [
    "ForerunError",
    "Run",
    "RunConfig",
    "__version__",
    "attach",
    "bridge_callback",
    "hugging_face_callback",
    "lightning_callback",
    "load",
    "should_stop",
]


_HOMES = {
    "ForerunError": "calib.errors",
    "Run": "launch.opened.run",
    "RunConfig": "calib.workload.config",
    "attach": "hooks.session.attaching",
    "bridge_callback": "hooks.adapters.bridge",
    "hugging_face_callback": "hooks.adapters.hugging_face",
    "lightning_callback": "hooks.adapters.lightning",
    "load": "launch.opened.run",
    "should_stop": "hooks.process.stopping",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # ``from`` takes an AttributeError of ours for a missing name, and hides what was wrong.
    try:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except AttributeError as err:
        raise ImportError(f"{name} of {__name__}.{_HOMES[name]}: {err}") from err
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
