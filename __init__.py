"""Forerun: calibrates itself on the first steps of a training run, then forecasts the rest.

The names below are resolved on first use, so that ``import forerun`` loads neither numpy nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calib.errors import ForerunError as ForerunError
    from .calib.workload.config import RunConfig as RunConfig
    from .hooks.adapters.bridge import bridge_callback as bridge_callback
    from .hooks.adapters.hugging_face import hugging_face_callback as hugging_face_callback
    from .hooks.adapters.lightning import lightning_callback as lightning_callback
    from .hooks.process.stopping import should_stop as should_stop
    from .hooks.session.attaching import attach as attach
    from .launch.opened.loading import load as load
    from .launch.opened.run import Run as Run

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
    "ForerunError": ".calib.errors",
    "Run": ".launch.opened.run",
    "RunConfig": ".calib.workload.config",
    "attach": ".hooks.session.attaching",
    "bridge_callback": ".hooks.adapters.bridge",
    "hugging_face_callback": ".hooks.adapters.hugging_face",
    "lightning_callback": ".hooks.adapters.lightning",
    "load": ".launch.opened.loading",
    "should_stop": ".hooks.process.stopping",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
