"""Each option of Megatron-LM that is not modelled in a live launch of its own, on a CPU.

    python benchmarks/live_options.py CLONE [--jobs 2] [--only NAME ...]

``CLONE`` is an exported core_v0.16.1 with ``helpers_cpp`` built; its unmodified ``pretrain_gpt.py``
trains a tiny model with ``--calibrate`` and one option.  Options that Megatron refuses, or that a
CPU cannot run, are listed with the last line of output.  Every other run has to end with an answer
that names the option, and with intervals of alternatives widened by the factor for unmodelled
options; the exit code is 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.megatron_matrix import MODEL
from forerun.benchmarks.option_table import kind_of, samples_of
from forerun.calib.arguments import ASIDE, SPELLED, UNMODELLED_FACTOR

TIMEOUT_S = 240
FLAGS = ("--calibrate", "--calibrate-device=cpu", "--calibrate-steps=6", "--calibrate-every=0")


def main() -> int:
    """Print the outcome for each option; return 1 if an answer does not mention it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clone", type=Path, metavar="CLONE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="options without their dashes")
    args = parser.parse_args()
    samples = samples_of(args.clone)
    options = {o: word for o, word in samples.items() if kind_of(o) == "not modelled"}
    if args.only:
        options = {f"--{name}": samples[f"--{name}"] for name in args.only}
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(args.jobs) as pool:
        plain = _launched(args.clone, Path(home), [])
        print(f"without any: {plain}", flush=True)
        outcomes = pool.map(
            lambda option: _outcome(args.clone, Path(home), option, options[option]), options
        )
        rows = []
        for (option, word), outcome in zip(options.items(), outcomes, strict=True):
            rows.append([f"{option} {word}".strip(), *outcome])
            print(*rows[-1], sep=" | ", flush=True)
    print(markdown_table(["option", "launch", "answer"], sorted(rows, key=lambda row: row[1:])))
    print(dict(Counter((row[1].partition(":")[0], row[2]) for row in rows)))
    return int(plain != "" or any(row[2].startswith("wrong") for row in rows))


def _outcome(clone: Path, home: Path, option: str, word: str) -> tuple[str, str]:
    """Return the outcome of the launch, and what its answer says about the option."""
    place = home / option.lstrip("-")
    refusal = _launched(clone, place, [option, *([word] if word else [])])
    if refusal:
        return f"does not run: {refusal}", ""
    return "ran", _check_answer(place / "out", option)


def _launched(clone: Path, place: Path, more: list[str]) -> str:
    """Train; return the last output of a failed run, else ""."""
    place.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(clone.resolve() / "pretrain_gpt.py"), *MODEL, "--train-iters", "14"]
    forerun_options = [*FLAGS, f"--calibrate-dir={place / 'out'}"]
    env = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(clone.resolve()), env.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [*launcher, "--nproc-per-node=1", *script, *more, *forerun_options],
            **{"env": env, "cwd": place, "capture_output": True, "text": True},
            **{"timeout": TIMEOUT_S, "check": False},
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    if not done.returncode:  # some options end the program with a message and no error
        return "" if (place / "out").exists() else done.stdout.splitlines()[-1][-160:]
    find_error = re.compile(r"Error:| error: ").search
    named = next((line for line in done.stderr.splitlines() if find_error(line)), "")
    return (named or done.stderr[-200:]).strip()[-160:]


def _check_answer(out: Path, option: str) -> str:
    """Return a problem unless the run's answer names the option and has wider intervals for it."""
    plain = option.lstrip("-").replace("-", "_")
    name = SPELLED.get(plain, (plain, None))[0]
    begin = time.monotonic()
    while not (out / "report.html").exists():  # the companion outlives the launch
        if time.monotonic() - begin > TIMEOUT_S:
            return "wrong: no answer"
        time.sleep(0.5)
    plan = json.loads((out / "answer.json").read_text(encoding="utf-8"))["plan"]
    if name not in plan["config"]["unmodelled"]:
        return "wrong: not named"
    if name not in (out / "report.html").read_text(encoding="utf-8"):
        return "wrong: not in the report"
    others = [one for one in plan["candidates"] if one["micro_batch_size"] != 2]
    least = min(math.log(one["high_s"] / one["low_s"]) / 2 for one in others)
    if name in ASIDE:
        return "named"
    return "named, wider" if least >= math.log(UNMODELLED_FACTOR) else f"wrong: {least:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
