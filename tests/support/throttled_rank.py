"""Run a training script with one rank throttled: each of its layers burns time after its forward.

THROTTLED_RANK says which, THROTTLED_S for how long; the script and its arguments follow.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer


def throttle(burn_s: float) -> None:
    """Make every layer of this process slower."""
    forward = TransformerLayer.forward

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        end_s = time.perf_counter() + burn_s
        while time.perf_counter() < end_s:
            pass
        return result

    TransformerLayer.forward = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["THROTTLED_RANK"] == os.environ["RANK"]:
        throttle(float(os.environ["THROTTLED_S"]))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
