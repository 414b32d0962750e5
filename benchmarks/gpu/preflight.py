"""State of the machine: versions, the driver, packages, and whether Transformer Engine trains a
layer."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress

from forerun.benchmarks.gpu.bench import Bench

_PACKAGES = (
    "numpy", "scipy", "pandas", "pyarrow", "scikit-learn", "transformers", "megatron-core",
    "transformer-engine", "nvidia-ml-py",
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
            nccl=_nccl_version(),
        )
        _try_engine(bench)
    bench.put(packages={name: _version(name) for name in _PACKAGES})
    bench.put(driver=_output_of(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]))
    bench.put(doctor=_output_of([sys.executable, "-m", "forerun.launch.cli", "doctor"]))


def _nccl_version() -> int | None:
    """Return the version of the loaded library; torch tells that which it was built with."""
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
        return version.value
    return None


def _try_engine(bench: Bench) -> None:
    """Train a layer of Transformer Engine in bf16, then in fp8; note how far that went."""
    import torch

    bench.put(has_engine=False)
    try:
        import transformer_engine.pytorch as te

        shape = {"num_attention_heads": 16, "self_attn_mask_type": "causal"}
        layer = te.TransformerLayer(1024, 4096, **shape, params_dtype=torch.bfloat16).cuda()
        for name in ("bf16", "fp8"):
            hidden = torch.randn(512, 2, 1024, device="cuda", dtype=torch.bfloat16)
            with te.fp8_autocast(enabled=name == "fp8"):
                loss = layer(hidden.requires_grad_()).float().pow(2).mean()
            loss.backward()
            bench.put(**{"has_engine": True, f"engine_{name}_loss": loss.item()})
    except Exception as err:  # without it all is measured on core's own layers
        bench.put(engine_problem=f"{type(err).__name__}: {err}"[:500])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"none: {err}"[:200]
    return (done.stdout + done.stderr)[-4000:].strip()
