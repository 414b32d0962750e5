"""One measurement of ``collect.py``, in a process of its own."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from forerun.benchmarks.gpu.bench import Bench, NotHere

HOMES = {
    "preflight": "preflight",
    "base": "sweep",
    "predictions": "sweep",
    "sweep": "sweep",
    "shards": "sweep",
    "turns": "sweep",
    "moe": "sweep",
    "two_ranks": "launches",
}
"""Module of each measurement; the measurement is its function of that name."""


def main() -> int:
    """Measure; return 0 if it ran to its end or is impossible here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=tuple(HOMES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    end_s = time.monotonic() + args.limit
    bench = Bench(out=args.out, work=args.work, end_s=end_s, is_cpu=args.cpu)
    with suppress(OSError, ValueError):  # of a process that was ended before this one
        bench.figures = json.loads(args.out.read_text(encoding="utf-8"))["figures"]
    bench.write()
    try:
        module = importlib.import_module(f"forerun.benchmarks.gpu.{HOMES[args.name]}")
        getattr(module, args.name)(bench)
        bench.state = "done"
    except (NotHere, ImportError) as err:
        bench.state, bench.why = "not here", str(err)
    except Exception as err:
        traceback.print_exc()
        bench.state, bench.why = "failed", f"{type(err).__name__}: {err}"[-500:]
    bench.write()
    return int(bench.state == "failed")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written, and destroying a group may wait for a failed device
