"""The search for a layout on 1,024 GPUs: ours and others', on the same cases in one run.

    python benchmarks/search_peers.py [--calculon DIR] [--estimate-train-time DIR] [--data DIR]
        [--quick-start DIR] [--seconds 60] [--limit 200] [--work DIR] [--json OUT]

Two cases: a dense model of 175B and an MoE of 671B (``peers/search_cases.py``), from a calibration
of eight ranks with planted times and, if given, from the quick start's, transferred to the same
GPU. The DIRs of others are clones of calculon-ai/calculon and of DebarghaG/estimate-train-time
(copied before it writes there); ``--data`` contains the tables that the latter was fitted on.
Every tool runs in a process of its own, on one thread.  Layouts per second are per second of
processor time, regardless of other load; for our plan, proven layouts count (evaluated, or ruled
out by memory or a bound), for others evaluated ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.benchmarks.child_process import answer_of
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.peers.search_cases import CASES, DEVICE
from forerun.benchmarks.published.readers import model_over, steps_of
from forerun.benchmarks.runs.synthetic_run import write_synthetic_run
from forerun.calib.units import GIB

DENSE = "dense 175B"
PAPER_TABLES = ("ops_ett_fwd_bwd", "ops_ett_optimizer", "coll_ett")
PAPER_ROWS = {
    "llemma_7b_4_2_2_P": "Llemma-7B 4-2-2 Perlmutter",
    "llemma_7b_4_2_2_V": "Llemma-7B 4-2-2 Vista",
}
"""Examples of the paper's tool, by their row in ``recipes/published/steps_paper_implied.csv``."""
COVERS: Mapping[str, str] = {
    "ours": "TP, SP, PP with uneven stages, VPP, CP, EP, ETP, DP with shards, micro-batch, "
    "recompute by modules and layers, FSDP, overlaps, offload; the best proven; memory with the "
    "measured offset, schedule simulated, 90 % interval, measured operators and steps",
    "Calculon": "TP, SP, PP even, VPP, DP, micro-batch, recompute, optimizer shards, overlap of TP "
    "and DP, offload; memory with 2-byte gradients and unfused attention, schedule in closed form; "
    "efficiencies of a system by hand, no interval, no experts, no CP, nothing measured",
    "estimate-train-time": "TP, PP of three stages or more, DP, micro-batch; measured operators by "
    "regressors of two clusters; no memory, schedule as all forwards then all backwards, no "
    "overlap, no interval, no search",
}
PeerAnswer = dict[str, Any]


def main() -> None:
    """Print the tables."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        answers: PeerAnswer = {"ours": _ours(work, arguments.quick_start)}
        if arguments.calculon:
            answers["calculon"] = _calculon(work, arguments, answers["ours"])
        if arguments.estimate_train_time:
            answers["paper"] = _paper(work, arguments)
    print(_search_text(answers))
    print("\n" + markdown_table(["tool", "covers"], COVERS.items()))
    if "calculon" in answers:
        print("\n" + _best_text(answers["calculon"]))
    if "paper" in answers:
        print("\n" + _paper_text(answers["paper"]))
    if arguments.json:
        output = {"schema": 1, **answers}
        arguments.json.write_text(json.dumps(output, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calculon", type=Path, metavar="DIR", help="clone")
    parser.add_argument("--estimate-train-time", type=Path, metavar="DIR", help="clone")
    parser.add_argument("--data", type=Path, metavar="DIR", help="public tables, CSV")
    parser.add_argument("--quick-start", type=Path, metavar="DIR", help="calibrated on CPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="of Calculon's search (60)")
    parser.add_argument("--limit", type=int, default=200, help="layouts of the paper's tool (200)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where files are kept")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    return parser.parse_args()


def _child(module: str, *words: object) -> Any:
    """Return the output of a tool in a process of its own."""
    answer = answer_of(f"peers.{module}", *words)
    print(f"{module} {words[0]}: done", file=sys.stderr, flush=True)
    return answer


def _ours(work: Path, quick_start: Path | None) -> list[PeerAnswer]:
    answers = []
    for case in CASES.values():
        home = _synthetic(work, case.name)
        sources: dict[str, tuple[object, ...]] = {"eight ranks": (home,)}
        if quick_start is not None:
            sources["quick start"] = (quick_start, "--device", DEVICE)
        for name, words in sources.items():
            answer = _child("our_search", case.name, *words)
            answers.append({"case": case.name, "from": name, **answer})
    return answers


def _synthetic(work: Path, name: str) -> Path:
    home = work / name.replace(" ", "-")
    if not home.exists():
        home.mkdir()
        write_synthetic_run(home, CASES[name].eight_ranks())
    return home


def _calculon(work: Path, arguments: argparse.Namespace, ours: Sequence[PeerAnswer]) -> PeerAnswer:
    """Run its search; price its best by us, and our best layouts that it supports by it."""
    dense = next(one for one in ours if one["case"] == DENSE)
    shared = [line for line in dense["best"] if line["layout"]["is_usual"]]
    layouts_file = work / "ours.json"
    layouts_file.write_text(json.dumps([line["layout"] for line in shared]), encoding="utf-8")
    words = (arguments.calculon, "--seconds", arguments.seconds, "--price", layouts_file)
    answer: PeerAnswer = _child("calculon_search", *words)
    best = answer["shared"]["best"]
    layouts_file = work / "calculon.json"
    layouts_file.write_text(json.dumps([line["layout"] for line in best]), encoding="utf-8")
    priced = _child("our_search", DENSE, _synthetic(work, DENSE), "--price", layouts_file)
    return {**answer, "our_best": shared, "priced_by_us": priced}


def _paper(work: Path, arguments: argparse.Namespace) -> PeerAnswer:
    home = work / "estimate-train-time"
    if not home.exists():
        shutil.copytree(arguments.estimate_train_time, home)
    answer: PeerAnswer = _child("paper_tool", home, "--limit", arguments.limit)
    if arguments.data:
        model = model_over(arguments.data, PAPER_TABLES)
        rows = {row.row_id: row for row in steps_of(arguments.data, "steps_paper_implied").rows}
        for example, row_id in PAPER_ROWS.items():
            row = rows[row_id]
            predicted = model.fit([]).predict([row])
            times_s = (row.measured_s, predicted.time_s[0], predicted.low_s[0], predicted.high_s[0])
            answer.setdefault("ours", {})[example] = list(map(float, times_s))
    return answer


def _search_text(answers: PeerAnswer) -> str:
    rows = [_our_row(one) for one in answers["ours"]]
    if "calculon" in answers:
        native, shared = answers["calculon"]["own"], answers["calculon"]["shared"]
        peak = answers["calculon"]["peak_nbytes"]
        rows.append(_row("Calculon, its own space (a part)", DENSE, native["space"], native, peak))
        rows.append(_row("Calculon, what Megatron runs", DENSE, shared["evaluated"], shared, peak))
    if "paper" in answers:
        paper = answers["paper"]
        title = "estimate-train-time, loop over its API"
        rows.append(_row(title, f"{DENSE} on A100", paper["space"], paper, paper["peak_nbytes"]))
    head = ["tool", "case", "layouts", "evaluated", "clock s", "processor s", "layouts/s"]
    return markdown_table([*head, "ms each", "peak GiB", "best", "step"], rows)


def _our_row(one: PeerAnswer) -> list[object]:
    counts = ", ".join(f"{name} {value:,}" for name, value in one["counts"].items())
    number, seconds = one["counts"]["num_layouts"], one["processor_seconds"]
    best = next(iter(one["best"]), None)
    return [
        *(f"ours, from {one['from']}", one["case"], f"{number:,}", counts),
        *(f"{one['seconds']:.1f}", f"{seconds:.1f}"),
        *(f"{number / seconds:,.0f}", f"{1e3 * seconds / number:.2g}"),
        f"{one['peak_nbytes'] / GIB:.2f}",
        best["label"] if best else "-",
        _interval(best) if best else "-",
    ]


def _row(title: str, case: str, space: int, part: PeerAnswer, peak_nbytes: int) -> list[object]:
    number, seconds = part["evaluated"], part["seconds"]
    best = next(iter(part.get("best", ())), None)
    return [
        *(title, case, f"{space:,}", f"{number:,}", "-", f"{seconds:.1f}"),
        *(f"{number / seconds:,.0f}", f"{1e3 * seconds / number:.2g}"),
        f"{peak_nbytes / GIB:.2f}",
        _label(best.get("layout", best)) if best else "-",
        f"{best['step_time_s']:.2f} s" if best else "-",
    ]


def _best_text(answer: PeerAnswer, number: int = 5) -> str:
    """Return the best layouts of either tool, timed by both."""
    rows = []
    pairs = zip(answer["shared"]["best"], answer["priced_by_us"], strict=True)
    for line, priced in list(pairs)[:number]:
        by_us = priced.get("refused") or f"{_interval(priced)}, {priced['verdict']}"
        rows.append(["Calculon", _label(line["layout"]), f"{line['step_time_s']:.2f} s", by_us])
    pairs = zip(answer["our_best"], answer["priced"], strict=True)
    for line, time_s in list(pairs)[:number]:
        by_it = "refused" if time_s is None else f"{time_s:.2f} s"
        rows.append(["ours", line["label"], by_it, f"{_interval(line)}, {line['verdict']}"])
    return markdown_table(["best of", f"{DENSE}, layout", "by Calculon", "by us"], rows)


def _paper_text(paper: PeerAnswer) -> str:
    rows = []
    for example, time_s in paper["examples"].items():
        measured, *ours = paper.get("ours", {}).get(example, [None])
        rows.append(
            [
                example,
                f"{time_s:.2f} s",
                f"{ours[0]:.2f} s ({ours[1]:.2f} to {ours[2]:.2f})" if ours else "-",
                f"{measured:.2f} s" if measured else "-",
            ]
        )
    head = ["example of estimate-train-time", "its answer", "ours, on its tables", "run (implied)"]
    return markdown_table(head, rows)


def _interval(line: PeerAnswer) -> str:
    return f"{line['step_time_s']:.2f} s ({line['low_s']:.2f} to {line['high_s']:.2f})"


def _label(layout: Mapping[str, Any]) -> str:
    degrees = ("tp", "pp", "vp", "dp")
    words = [f"{name.upper()}{layout[name]}" for name in degrees if layout.get(name, 1) > 1]
    words.append(f"mbs{layout['micro_batch_size']}")
    recompute = layout.get("recompute", "none")
    return " ".join([*words, *([recompute] if recompute != "none" else [])])


if __name__ == "__main__":
    main()
