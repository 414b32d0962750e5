"""Forerun: calibrates itself on the first steps of a training run, then forecasts the rest.

The names below are resolved on first use, so that ``import forerun`` loads neither numpy nor torch.
"""

from __future__ import annotations

# Without typing: ``python -m forerun`` still has the working directory on its path here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .calib.errors import ForerunError
    from .calib.workload import RunConfig
    from .hooks.adapters import bridge_callback, hugging_face_callback, lightning_callback
    from .hooks.process import should_stop
    from .hooks.session import attach
    from .launch.opened import Run, load

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


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .faces import lazy_getattr  # local: pytest imports this file outside a package

    return lazy_getattr(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
