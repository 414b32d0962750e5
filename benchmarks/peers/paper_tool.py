"""Predictions of the paper's tool for the dense case and its own examples, in a process of its own.

    python -m forerun.benchmarks.peers.paper_tool HOME [--limit 200]

HOME is a writable clone of DebarghaG/estimate-train-time: the tool stores its fitted regressors
there.  Prints JSON.  It has no search and no model of memory, knows two clusters (A100 with four
per node, GH200 with one), and supports TP, PP and DP without virtual stages, overlap or recompute
choices; so it is run for every TP, PP and micro-batch of the dense model on the same number of its
A100, with the operators of its example.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import random
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forerun.benchmarks.child_process import peak_nbytes
from forerun.benchmarks.peers.search_cases import CASES, NUM_GPUS

EXAMPLES = ("llemma_7b_4_2_2_P", "llemma_7b_4_2_2_V")
CASE = CASES["dense 175B"]
_PER_NODE = 4
"""GPUs per node of Perlmutter."""
_LEAST_STAGES = 3
"""Fewest stages it supports: a first, a middle and a last one."""
_MOST_TP = 16
_US = 1e-6
_SEED = 1
NUM_BEST = 20


class PaperTool:
    """The package in a clone, with one set of regressors for all queries."""

    def __init__(self, home: Path) -> None:
        sys.path.insert(0, str(home / "src"))
        # It reads traces with this, which is not needed here.
        sys.modules.setdefault("ijson", types.ModuleType("ijson"))
        self._ours: Any = importlib.import_module("estimate_train_time.estimator.prediction")
        self._tools: Any = importlib.import_module("estimate_train_time.estimator.tools")
        self._examples = home / "examples" / "target_config"
        self._predictors: dict[str, Any] = {}

    def example_s(self, name: str) -> float:
        """Return seconds of one of its own examples."""
        return self._step_s(self._config(name))

    def dense_s(self, tp: int, pp: int, micro: int) -> float:
        """Return seconds of a step of the dense case on as many GPUs of its A100 cluster."""
        model, dp = CASE.eight_ranks().model, NUM_GPUS // (tp * pp)
        rounds = CASE.global_batch_size // (dp * micro)
        heads, seq, hidden = model.num_attention_heads, model.seq_length, model.hidden_size
        config = self._config(EXAMPLES[0])
        config["training_config"] = [pp, tp, dp, micro, heads, seq, hidden, rounds, _PER_NODE]
        config["encoders"] = 96
        return self._step_s(config)

    def _config(self, name: str) -> dict[str, Any]:
        return dict(self._tools.config_decoder(str(self._examples / f"{name}.yml")))

    def _step_s(self, config: dict[str, Any]) -> float:
        folders = [
            self._ours._resolve_data_path(config[f"{name}_data_folder"], str(self._examples))
            for name in ("operator", "nccl")
        ]
        predictor = self._predictors.setdefault(folders[0], self._ours.Predictor())
        layers = self._ours.pp_partitions(config["encoders"], config["training_config"][0])
        with contextlib.redirect_stdout(io.StringIO()):
            step_us = self._ours.get_operator_statistics(
                predictor,
                config["gpu_name"],
                *folders,
                config["training_config"],
                config["comm_bucket"],
                layers,
                *(config[name] for name in ("function_list", "encoder_function_list")),
                *(config[name] for name in ("layernorm_name", "fwd_syncs", "bwd_syncs")),
            )
        return _US * float(step_us)


def layouts() -> Iterator[tuple[int, int, int]]:
    """Yield every TP, PP and micro-batch that it supports."""
    heads = CASE.eight_ranks().model.num_attention_heads
    for tp in (d for d in range(1, _MOST_TP + 1) if NUM_GPUS % d == 0 and heads % d == 0):
        for pp in (d for d in range(_LEAST_STAGES, 97) if NUM_GPUS // tp % d == 0):
            dp = NUM_GPUS // (tp * pp)
            samples = CASE.global_batch_size // dp
            if CASE.global_batch_size % dp == 0 and dp > 1:
                yield from ((tp, pp, m) for m in (1, 2, 4, 8) if samples % m == 0)


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("home", type=Path, metavar="HOME", help="clone that may be written to")
    parser.add_argument("--limit", type=int, default=200, help="layouts of the dense case (200)")
    arguments = parser.parse_args()
    tool = PaperTool(arguments.home)
    begin = time.process_time()
    examples = {name: tool.example_s(name) for name in EXAMPLES}
    fitting_s = time.process_time() - begin
    results = _dense(tool, arguments.limit)
    results |= {"examples": examples, "fitting_seconds": fitting_s}
    results["peak_nbytes"] = peak_nbytes()
    print(json.dumps(results))


def _dense(tool: PaperTool, limit: int) -> dict[str, Any]:
    every = list(layouts())
    sampled = random.Random(_SEED).sample(every, min(limit, len(every)))
    tool.dense_s(*sampled[0])  # loads regressors that the examples do not use
    begin, lines, refused = time.process_time(), [], 0
    for tp, pp, micro in sampled:
        try:
            step_time_s = tool.dense_s(tp, pp, micro)
        except (KeyError, IndexError, ValueError):
            refused += 1
            continue
        lines.append({"step_time_s": step_time_s, "tp": tp, "pp": pp, "micro_batch_size": micro})
    seconds = time.process_time() - begin
    lines.sort(key=lambda line: line["step_time_s"])
    counts = {"space": len(every), "evaluated": len(sampled), "refused": refused}
    return {**counts, "seconds": seconds, "best": lines[:NUM_BEST]}


if __name__ == "__main__":
    main()
