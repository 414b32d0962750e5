"""What is there: versions, the driver, and whether everything that is measured can be imported."""

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
_ASKED = "name,driver_version,memory.total,mig.mode.current,clocks.max.sm,power.limit"


def preflight(bench: Bench) -> None:
    """Nothing here changes anything; what is missing is named."""
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
    bench.put(driver=_said(["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]))
    bench.put(doctor=_said([sys.executable, "-m", "forerun.launch.cli", "doctor"]))
    bench.put(**_own_libraries())


def _version(name: str) -> str:
    try:
        module = importlib.import_module(name)
    except Exception as err:  # a package may fail in any way where its GPU is missing
        return f"none: {type(err).__name__}: {err}"[:200]
    return str(getattr(module, "__version__", "there"))


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"none: {err}"[:200]
    return (done.stdout + done.stderr)[-4000:].strip()


def _own_libraries() -> dict[str, Any]:
    """What Forerun itself looks for by name, and would silently do without."""
    from dataclasses import asdict

    from forerun.hooks.process import detect_links
    from forerun.hooks.recording import find_dump, find_exchange

    return {
        "links": asdict(detect_links()),
        "has_exchange": find_exchange() is not None,
        "has_dump": find_dump() is not None,
    }
