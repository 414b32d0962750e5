"""Compares a rank that we generate with the same rank of a real megatron.core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage_tensors import parameter_tensors

from forerun.calib.layers.buckets import buckets
from forerun.calib.layers.stage_work import stage_operators, step_collectives
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Normalization, PositionEmbedding, RunConfig
from forerun.calib.workload.ranks import group, position

PROBE = Path(__file__).parent / "expert_probe.py"
TIMEOUT_S = 300
CONTROL_NBYTES = 64
"""Norms and flags are at most this long, and are left out by design."""
NOT_GENERATED = {"other", "model", "world"}
LLAMA = {
    "normalization": Normalization.RMS_NORM,
    "position_embedding": PositionEmbedding.ROPE,
    "is_gated": True,
    "has_bias": False,
    "is_tied": False,
}


@pytest.fixture
def llama(layout: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes a config of a small model with the parts that models with experts have."""

    def make(*, model: dict[str, Any] | None = None, dp: int = 1, **settings: Any) -> RunConfig:
        settings = {"samples": 4 * dp, **settings}
        return layout(model={**LLAMA, "num_layers": 2, **(model or {})}, dp=dp, **settings)

    return make


class ExpertProbe:
    """``expert_probe.py`` in a process of its own, which answers for one rank after another."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._process: subprocess.Popen[str] | None = None

    def ask(self, config: RunConfig, rank: int) -> dict[str, Any]:
        """Return the rank's state and work; a failing rank ends the process, not the next ask."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        limit = threading.Timer(TIMEOUT_S, process.kill)
        limit.start()
        try:
            print(json.dumps([config.to_json(), rank]), file=process.stdin, flush=True)
            result = next((line for line in process.stdout if line.startswith("RESULT")), "")
        except BrokenPipeError:
            result = ""
        finally:
            limit.cancel()
        if not result:
            self.close()
        assert result, self._errors.read_text()[-3000:]
        return json.loads(result.removeprefix("RESULT"))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", str(PROBE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            )


@pytest.fixture(scope="session")
def expert_probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertProbe]:
    """One for the tests of all files: what is dear is to import megatron.core."""
    probe = ExpertProbe(tmp_path_factory.mktemp("probe") / "errors.txt")
    yield probe
    probe.close()


@pytest.fixture
def assert_as_megatron(expert_probe: ExpertProbe) -> Callable[..., None]:
    """Asserts that a rank holds, runs and sends what it does in Megatron.

    ``unseen`` are kinds that run outside of what the hooks see in this layout: they are generated,
    and must not have been recorded.
    """

    def check(config: RunConfig, rank: int, unseen: Iterable[tuple[Any, ...]] = ()) -> None:
        result = expert_probe.ask(config, rank)
        stage = position(config.parallelism, rank).stage
        assert [t.numel for t in parameter_tensors(config, stage)] == result["parameters"]
        generated = [[bucket.numel, bucket.is_expert] for bucket in buckets(config, stage)]
        assert generated == result["buckets"]
        for role, ranks in result["groups"].items():
            assert list(group(config.parallelism, GroupRole(role), rank)) == ranks
        operators = _operators(config, stage)
        hidden = {key for key in operators if key[:3] in set(unseen)}
        assert len(hidden) == len(set(unseen))
        recorded = {(*key[:2], tuple(key[2]), *key[3:]): n for *key, n in result["operators"]}
        assert {key: n for key, n in operators.items() if key not in hidden} == recorded
        assert _calls(config, stage) == {
            tuple(call): count
            for *call, count in result["calls"]
            if call[1] not in NOT_GENERATED and call[2] > 1 and call[3] > CONTROL_NBYTES
        }

    return check


def _operators(config: RunConfig, stage: int) -> dict[tuple[Any, ...], int]:
    """Kind, phase, shape and element size of each, and how often a step runs it."""
    work = stage_operators(config, stage)
    return {
        (o.kind.value, o.phase.value, o.shape, o.element_nbytes): n * config.num_microbatches
        for o, n in (*work.forward, *work.backward, *work.recompute)
        if o.shape  # the host's remainders have none
    }


def _calls(config: RunConfig, stage: int) -> dict[tuple[Any, ...], int]:
    calls: dict[tuple[Any, ...], int] = {}
    for call, count in step_collectives(config, stage=stage):
        key = call.collective.value, call.role.value, call.num_ranks, call.nbytes
        calls[key] = calls.get(key, 0) + count
    return calls
