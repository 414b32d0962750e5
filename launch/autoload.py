"""Start-up in a worker, called by the entry point: the stand-in and the session, if requested."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence

from .._forerun_autoload import load as load  # entry point of older installations
from .._forerun_autoload import print_note

_begun: list[Sequence[str]] = []


def begin(calibrate_flags: Sequence[str], *, is_calibrating: bool, note: str = "") -> None:
    """Start the stand-in and the session; a second call does nothing.

    ``calibrate_flags`` are our flags as written, used only if ``is_calibrating``.  An error in them
    is printed as one line, and training goes on.  ``note`` is printed once training begins; if it
    never does, one line says so at the end of the process.
    """
    if _begun:
        return
    _begun.append(calibrate_flags)
    from ..calib.errors import ConfigError
    from ..calib.workload.run_options import AutoSwitch, DeviceChoice
    from ..hooks.process.interpreter import companion_command
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
        if settings.trace is AutoSwitch.ON:
            from ..hooks.recording.flight_recorder import prepare

            prepare(os.environ)
        from ..hooks.start import start

        notes = [note] if note else []
        start(settings, lambda: print_note(notes.pop()) if notes else None)
        if notes:
            atexit.register(_report_idle, notes, os.getpid())


def _report_idle(notes: Sequence[str], pid: int) -> None:
    if notes and pid == os.getpid():
        print_note(
            f"{notes[0].partition(' (')[0]}; nothing trained in this process, and ranks that it "
            "starts by multiprocessing are not seen: torchrun --nproc-per-node N starts them; "
            "FORERUN_OFF=1 leaves the flag to the program"
        )
