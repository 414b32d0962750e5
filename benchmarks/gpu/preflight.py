"""State of the machine: versions, the driver, and whether all measured packages can be imported."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from typing import Any

from forerun.benchmarks.gpu.bench import Bench

_PACKAGES = (
    "numpy", "scipy", "pandas", "pyarrow", "sklearn", "transformers", "megatron.core",
    "transformer_engine", "pynvml",
)  # fmt: skip
_QUERY = "name,driver_version,memory.total,mig.mode.current,clocks.max.sm,power.limit"


def preflight(bench: Bench) -> None:
    """Report what is installed and what is missing; change nothing."""
    import torch

    bench.put(
        python=platform.python_version(),
        machine=platform.machine(),
        num_cores=len(os.sched_getaffinity(0)),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        hip=str(torch.version.hip),
    )
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        bench.put(
            device=torch.cuda.get_device_name(),
            num_devices=torch.cuda.device_count(),
            memory_nbytes=total,
            free_nbytes=free,
            nccl=".".join(map(str, torch.cuda.nccl.version())),
        )
    bench.put(packages={name: _version(name) for name in _PACKAGES})
    bench.put(driver=_output_of(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]))
    bench.put(doctor=_output_of([sys.executable, "-m", "forerun.launch.cli", "doctor"]))
    bench.put(**_optional_libraries())


def _version(name: str) -> str:
    try:
        module = importlib.import_module(name)
    except Exception as err:  # a package may fail in any way if its GPU is missing
        return f"none: {type(err).__name__}: {err}"[:200]
    return str(getattr(module, "__version__", "there"))


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"none: {err}"[:200]
    return (done.stdout + done.stderr)[-4000:].strip()


def _optional_libraries() -> dict[str, Any]:
    """Return the libraries that Forerun looks up by name and silently does without."""
    from dataclasses import asdict

    from torch._C import _distributed_c10d

    from forerun.hooks.process import detect_links
    from forerun.hooks.recording import find_exchange

    return {
        "links": asdict(detect_links()),
        "has_exchange": find_exchange() is not None,
        "has_dump": hasattr(_distributed_c10d, "_dump_nccl_trace_json"),
    }
