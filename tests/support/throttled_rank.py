"""Run a training script with one rank throttled: each of its layers burns time after its forward.

THROTTLED_RANK says which, THROTTLED_S for how long, THROTTLED_AFTER after how many forwards of its
layers that begins (at once); the script and its arguments follow.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer


def throttle(burn_s: float, after: int = 0) -> None:
    """Make every layer of this process slower, from the forward after ``after`` on."""
    forward = TransformerLayer.forward
    num_forwards = 0

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        result = forward(self, *args, **kwargs)
        if num_forwards <= after:
            return result
        end_s = time.perf_counter() + burn_s
        while time.perf_counter() < end_s:
            pass
        return result

    TransformerLayer.forward = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["THROTTLED_RANK"] == os.environ["RANK"]:
        throttle(float(os.environ["THROTTLED_S"]), int(os.environ.get("THROTTLED_AFTER", "0")))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
