"""Memory of a rank of a real FSDP2 or HSDP loop, against that of its description."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.arguments.hugging_face import Training, from_training
from forerun.calib.memory.peak import memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]
PROBE = Path(__file__).with_name("sharded_states_probe.py")
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
NUM_RANKS = 4


def measured(dtype: str, num_copies: int) -> dict[str, int]:
    request = {"llama": LLAMA, "dtype": dtype, "num_ranks": NUM_RANKS, "num_copies": num_copies}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_copies", [1, 2])
def test_shards_are_as_large_as_they_are_told(dtype: str, num_copies: int) -> None:
    training = Training(
        micro_batch_size=2,
        seq_length=32,
        num_ranks=NUM_RANKS,
        is_sharded=True,
        num_copies=num_copies,
        element_dtype=dtype,
    )
    estimate = memory(from_training({"model_type": "llama", **LLAMA}, training))
    for part, nbytes in measured(dtype, num_copies).items():
        assert getattr(estimate, part) == pytest.approx(nbytes, rel=1e-3), part
