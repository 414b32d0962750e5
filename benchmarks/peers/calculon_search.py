"""Calculon's search over one model and system, in a process of its own.

    python -m forerun.benchmarks.peers.calculon_search CALCULON_DIR [--seconds 60] [--price FILE]

CALCULON_DIR is a clone of calculon-ai/calculon.  Prints JSON: the size of its own space, and the
rate at which its search covers parts of it, drawn in random order for the given seconds; then the
best of all layouts that Megatron supports too, by its model (nothing offloaded to the host, no
split transfers of TP; TP inside a node, all else between nodes).  ``--price`` is a list of layouts
(``search_cases.plain_layout``) that are timed as well.  Seconds are processor time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.benchmarks.child_process import peak_nbytes
from forerun.benchmarks.peers.search_cases import CASES, NUM_GPUS

MODEL, SYSTEM = "models/gpt3-175B.json", "systems/h100_80g_nvl8.json"
DATATYPE = "float16"
SAMPLES = CASES["dense 175B"].global_batch_size
NUM_BEST = 20
MOST_VIRTUAL = 8
"""Virtual stages, as many as in our own space."""
_SEED = 1
_RECOMPUTE = {"full": "full", "selective": "attn_only", "none": "none"}


class Calculon:
    """The package in a clone, and the case in its terms."""

    def __init__(self, home: Path) -> None:
        sys.path.insert(0, str(home))
        self._llm: Any = importlib.import_module("calculon.llm").Llm
        self.search: Any = importlib.import_module(
            "calculon.llm.optimal_execution"
        ).OptimalExecution
        system: Any = importlib.import_module("calculon").System
        self.app = self._llm.Application(_json(home / MODEL))
        self.system = system(_json(home / SYSTEM))
        self._resident = system(self._without_host_memory(_json(home / SYSTEM)))

    @staticmethod
    def _without_host_memory(described: dict[str, Any]) -> dict[str, Any]:
        return described | {"mem2": described["mem2"] | {"GiB": 0}}

    def parts(self) -> list[tuple[Any, ...]]:
        """Return arguments of its search by TP, PP, virtual stages, recompute, sharding and
        transfers, as its command ``llm-optimal-execution`` has them, without fused activations
        off."""
        calls = []
        for tp, pp, dp, virtual in self._degrees():
            for recompute in ("full", "attn_only", "none"):
                for is_sharded in (True, False) if dp > 1 else (False,):
                    for transfers in ("ar", "p2p_rs_ag", "rs_ag"):
                        degrees = (tp, pp, dp, virtual, SAMPLES)
                        choices = (recompute, is_sharded, transfers, [True], False, True, True)
                        calls.append((self.app, self.system, *degrees, *choices))
        return calls

    def _degrees(self) -> Iterator[tuple[int, int, int, int]]:
        for tp in self._llm.get_all_tensor_parallelisms(
            NUM_GPUS, self.app.hidden, self.app.attn_heads
        ):
            for pp in self._llm.get_all_pipeline_parallelisms(NUM_GPUS, tp, self.app.num_blocks):
                dp = NUM_GPUS // (tp * pp)
                if SAMPLES % dp:
                    continue
                for virtual in self._llm.get_valid_pipeline_interleavings(self.app.num_blocks, pp):
                    yield tp, pp, dp, virtual

    def run(self, part: tuple[Any, ...], *, is_counted_only: bool) -> Any:
        """Return its search's result for one part: best, number, good, bad."""
        head = (is_counted_only, 1, False, NUM_GPUS, SAMPLES, DATATYPE)
        return self.search.search(*head, *part)

    def shared(self) -> Iterator[Mapping[str, Any]]:
        """Yield layouts that Megatron supports too, as in ``search_cases.plain_layout``."""
        for tp, pp, dp, virtual in self._degrees():
            samples = SAMPLES // dp
            for micro in (m for m in range(1, samples + 1) if samples % m == 0):
                if virtual > MOST_VIRTUAL or (virtual > 1 and samples // micro % pp):
                    continue
                for recompute in _RECOMPUTE:
                    yield {
                        **{"tp": tp, "pp": pp, "vp": virtual, "dp": dp, "cp": 1, "ep": 1},
                        "micro_batch_size": micro,
                        "recompute": recompute,
                        "is_sequence_parallel": tp > 1,
                        "is_optimizer_distributed": dp > 1,
                    }

    def time_s(self, layout: Mapping[str, Any]) -> float | None:
        """Return seconds of a step by its model; None if the layout cannot run."""
        model = self._llm(self.app, logging.Logger("sub"))
        try:
            execution = self._llm.Execution.from_json(_execution(layout))
            model.compile(self._resident, execution)
            model.run(self._resident)
        except (self._llm.Error, AssertionError):
            return None
        return SAMPLES / float(model.get_stats_json(False)["sample_rate"])


def _execution(layout: Mapping[str, Any]) -> dict[str, Any]:
    tp, pp, dp = (layout[name] for name in ("tp", "pp", "dp"))
    return {
        "num_procs": NUM_GPUS,
        **{"tensor_par": tp, "pipeline_par": pp, "data_par": dp},
        "tensor_par_net": int(tp > 8),
        **{"pipeline_par_net": int(pp > 1), "data_par_net": int(dp > 1)},
        "batch_size": SAMPLES,
        "microbatch_size": layout["micro_batch_size"],
        "datatype": DATATYPE,
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTE[layout["recompute"]],
        "pipeline_interleaving": layout["vp"],
        "optimizer_sharding": layout["is_optimizer_distributed"] and dp > 1,
        "tensor_par_comm_type": "rs_ag" if layout["is_sequence_parallel"] else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": layout["is_sequence_parallel"] and layout["recompute"] != "full",
        "data_par_overlap": dp > 1,
        **{"weight_offload": False, "activations_offload": False, "optimizer_offload": False},
        "training": True,
    }


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("home", type=Path, metavar="CALCULON_DIR", help="clone")
    parser.add_argument("--seconds", type=float, default=60.0, help="for its own search (60)")
    parser.add_argument("--price", type=Path, metavar="FILE", help="layouts to time beside")
    arguments = parser.parse_args()
    tool = Calculon(arguments.home)
    results: dict[str, Any] = {
        "own": _native_search(tool, arguments.seconds),
        "shared": _shared_search(tool),
    }
    if arguments.price is not None:
        layouts: Sequence[Mapping[str, Any]] = json.loads(arguments.price.read_text("utf-8"))
        results["priced"] = [tool.time_s(layout) for layout in layouts]
    results["peak_nbytes"] = peak_nbytes()
    print(json.dumps(results))


def _native_search(tool: Calculon, limit_s: float) -> dict[str, Any]:
    """Return the size of its space, and the rate at which it covers parts in random order."""
    parts = tool.parts()
    total = sum(tool.run(part, is_counted_only=True)[1] for part in parts)
    random.Random(_SEED).shuffle(parts)
    begin, evaluated, good = time.process_time(), 0, 0
    for part in parts:
        _, number, able, _, _, _ = tool.run(part, is_counted_only=False)
        evaluated, good = evaluated + number, good + able
        if time.process_time() - begin > limit_s:
            break
    seconds = time.process_time() - begin
    return {"space": total, "evaluated": evaluated, "able": good, "seconds": seconds}


def _shared_search(tool: Calculon) -> dict[str, Any]:
    """Return the best of the layouts that both tools know."""
    begin = time.process_time()
    layouts = list(tool.shared())
    times = [tool.time_s(layout) for layout in layouts]
    seconds = time.process_time() - begin
    able = sorted(
        ((time_s, place) for place, time_s in enumerate(times) if time_s is not None),
    )
    best = [{"step_time_s": time_s, "layout": layouts[place]} for time_s, place in able[:NUM_BEST]]
    return {"evaluated": len(layouts), "able": len(able), "seconds": seconds, "best": best}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


if __name__ == "__main__":
    main()
