"""The recipe on a device with PLANTED_NBYTES of memory, of which training takes
PLANTED_PEAK_NBYTES."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch  # noqa: F401  what is asked for in the arguments begins here

from forerun.hooks.session.instruments import Instruments

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"

if __name__ == "__main__":
    planted = [int(os.environ[name]) for name in ("PLANTED_NBYTES", "PLANTED_PEAK_NBYTES")]
    Instruments.device_memory_nbytes = lambda self: planted[0]  # type: ignore[method-assign]
    Instruments.memory_peak_nbytes = lambda self: planted[1]  # type: ignore[method-assign]
    sys.argv[0] = str(RECIPE)
    sys.path.insert(0, str(RECIPE.parent))
    runpy.run_path(str(RECIPE), run_name="__main__")
