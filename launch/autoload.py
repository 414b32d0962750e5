"""Entry point of the group ``torch.backends``: PyTorch calls it at the end of ``import torch``.

Without a flag of ours, or outside a worker of a distributed launch, it looks at the arguments and
returns.  An exception here would abort ``import torch``, so none leaves.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_OWNER = "FORERUN_OWNER_PID"
"""Set here, never by a user: what the training process starts inherits it, and opens no session."""


def load() -> None:
    """Start the stand-in and the session where they were asked for; a second call does nothing."""
    try:
        if "RANK" not in os.environ or not _is_asked():
            return
        if _OWNER not in os.environ:
            os.environ[_OWNER] = str(os.getpid())
            _begin()
        elif os.environ.get("FORERUN_DEVICE") == "cpu":
            _install_stand_in()  # a spawned child imports the same script, on the same device
    except Exception as err:  # training comes first, whatever is wrong with us
        _say(f"{type(err).__name__}: {err}; calibration is off, training goes on")


def _is_asked() -> bool:
    if os.environ.get("FORERUN_CALIBRATE") == "1" or os.environ.get("FORERUN_DEVICE") == "cpu":
        return True
    return any(argument.startswith("--calibrate") for argument in sys.argv[1:])


def _begin() -> None:
    from ..calib.errors import ConfigError
    from ..hooks.interpreter import companion_command
    from ..hooks.settings import DeviceChoice, TraceChoice
    from . import flags

    asked = flags.split(sys.argv[1:])
    sys.argv[1:] = asked.rest
    is_calibrating = asked.present or os.environ.get("FORERUN_CALIBRATE") == "1"
    settings = None
    if is_calibrating:
        command = companion_command(os.environ)
        try:
            settings = flags.parse(asked.own, os.environ, sys.argv, command)
        except ConfigError as err:
            _say(f"{err}; calibration is off, training goes on")
    is_cpu = os.environ.get("FORERUN_DEVICE") == "cpu"
    if settings is not None:
        is_cpu = settings.device is DeviceChoice.CPU
    if is_cpu:
        os.environ["FORERUN_DEVICE"] = "cpu"
        _install_stand_in()
    if settings is not None:
        if settings.trace is TraceChoice.ON:
            from ..hooks.flight_recorder import prepare

            prepare(os.environ)
        from ..hooks.session import start

        start(settings)


def _install_stand_in() -> None:
    from . import stand_in

    stand_in.install()


def _say(text: str) -> None:
    """One line, from one rank."""
    if os.environ.get("RANK") == "0":
        with suppress(OSError, ValueError, AttributeError):  # nobody may be reading, or no stdout
            print(f"[forerun] {text}", flush=True)
