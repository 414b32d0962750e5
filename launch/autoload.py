"""Start-up in a worker, called by the entry point: the stand-in and the session, if requested."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .._forerun_autoload import load as load  # entry point of older installations
from .._forerun_autoload import print_note

_begun: list[Sequence[str]] = []


def begin(calibrate_flags: Sequence[str], *, is_calibrating: bool) -> None:
    """Start the stand-in and the session; a second call does nothing.

    ``calibrate_flags`` are our flags as written, used only if ``is_calibrating``.  An error in them
    is printed as one line, and training goes on.
    """
    if _begun:
        return
    _begun.append(calibrate_flags)
    from ..calib.errors import ConfigError
    from ..calib.workload import DeviceChoice, TraceChoice
    from ..hooks.process import companion_command
    from .options import flags

    settings = None
    if is_calibrating:
        command = companion_command(os.environ)
        try:
            settings = flags.parse(calibrate_flags, os.environ, sys.argv, command)
        except ConfigError as err:
            print_note(f"{err}; calibration is off, training goes on")
    is_cpu = os.environ.get("FORERUN_DEVICE") == "cpu"
    if settings is not None:
        is_cpu = settings.device is DeviceChoice.CPU
    if is_cpu:
        from ..recipes.stand_in_cuda import install as stand_in

        os.environ["FORERUN_DEVICE"] = "cpu"
        stand_in.install()
    if settings is not None:
        if settings.trace is TraceChoice.ON:
            from ..hooks.recording import prepare

            prepare(os.environ)
        from ..hooks.start import start

        start(settings)
