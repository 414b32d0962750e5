"""Answers of every verb for three recorded directories, as JSON, compared with stored answers.

    python benchmarks/golden_answers.py [--write]

The directories are ``tests/golden/cpu_dp2``, that of a quick start
(``tests/golden/quickstart.tar.gz``) and an imported table of published steps; each verb is run on a
copy.  Without ``--write`` the answers are compared with ``tests/golden/answers`` and each
difference is a line; numbers may differ in the sixth digit, as processors do.  Values that depend
only on the clock or the machine are masked.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
ANSWERS = GOLDEN / "answers"
PUBLISHED = ROOT / "recipes" / "published"
CLOSE_FRAC = 1e-6
MASKED = re.compile(r"^(now_iso|now_unix_s|age_s|version)$")
"""Keys whose values depend on the clock or on the answering machine."""
MACHINE = "H100 DGXC BF16"
_LINE = (
    "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --bf16 --num-layers 32 --hidden-size "
    "4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size "
    "32000 --micro-batch-size 1 --global-batch-size 512 --use-distributed-optimizer"
)
LINE = _LINE.split()
QUESTIONS: dict[str, tuple[str, ...]] = {
    **{
        f"{place}_{name}": (verb, place, *words)
        for place in ("cpu", "quick")
        for name, verb, words in (
            ("report", "report", ()),
            ("status", "status", ()),
            ("running", "explain", ("running",)),
            ("explain", "explain", ("running", "1")),
            ("plan", "plan", ("--top", "5")),
            ("devices", "plan", ("--device", "H100,B200", "--gpus", "8,64", "--top", "2")),
            ("larger", "predict", ("--mbs", "4", "--gpus", "4")),
            ("h100", "predict", ("--device", "H100", "--gpus", "8")),
        )
    },
    "two_runs": ("diff", "cpu", "quick"),
    "table_plan": ("plan", "table", "--machine", MACHINE, "--top", "5"),
    "table_predict": ("predict", "table", "--machine", MACHINE, "--mbs", "2"),
    "table_normal": ("normal", "table", "--machine", MACHINE),
    "table_validate": ("validate", "steps", str(PUBLISHED / "steps_simumax_b200_8gpu.csv.gz")),
    "nowhere_predict": ("predict", "--device", "H100", "--tokens", "1T", "--", *LINE),
    "nowhere_plan": ("plan", "--device", "H100,B200", "--gpus", "64", "--top", "2", "--", *LINE),
}


def main() -> int:
    """Run all verbs, and write or compare; return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="these are the answers from now on")
    is_written = parser.parse_args().write
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as home:
        make_directories(Path(home))
        for name, words in QUESTIONS.items():
            answer, file = run_verb(words, Path(home)), ANSWERS / f"{name}.json"
            if is_written:
                ANSWERS.mkdir(exist_ok=True)
                file.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
            else:
                expected = json.loads(file.read_text(encoding="utf-8"))
                differences += json_differences(expected, answer, name)
    print("\n".join(differences) or f"{len(QUESTIONS)} answers as they were")
    return 1 if differences else 0


def make_directories(home: Path) -> None:
    """Make the three directories under ``home``: ``cpu``, ``quick`` and ``table``."""
    shutil.copytree(GOLDEN / "cpu_dp2", home / "cpu")
    with tarfile.open(GOLDEN / "quickstart.tar.gz") as packed:
        packed.extractall(home / "quick", filter="data")
    table = PUBLISHED / "steps_dgxc_scaling.csv.gz"
    _run(("import", "steps", str(table), "--out", "table"), home)


def run_verb(words: tuple[str, ...], home: Path) -> Any:
    """Return the JSON that a verb prints, masked, with its exit code."""
    place = words.index("--") if "--" in words else len(words)
    done = _run((*words[:place], "--json", *words[place:]), home)
    text = done.stdout.replace(str(home), "HOME").replace(str(ROOT), "ROOT")
    answer = json.loads(text) if text.strip() else done.stderr.replace(str(home), "HOME")
    return masked({"exit_code": done.returncode, "answer": answer})


def _run(words: tuple[str, ...], home: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "forerun", *words)
    return subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)


def masked(value: Any) -> Any:
    """Return the value without what depends on clock and machine."""
    if isinstance(value, dict):
        return {k: "masked" if MASKED.search(k) else masked(v) for k, v in value.items()}
    return [masked(one) for one in value] if isinstance(value, list) else value


def json_differences(expected: Any, answer: Any, where: str) -> Iterator[str]:
    """Yield a line for each place at which two JSON values differ."""
    if isinstance(expected, dict) and isinstance(answer, dict):
        for key in sorted({*expected, *answer}):
            yield from json_differences(expected.get(key), answer.get(key), f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(answer, list) and len(expected) == len(answer):
        for place, pair in enumerate(zip(expected, answer, strict=True)):
            yield from json_differences(*pair, f"{where}[{place}]")
    elif isinstance(expected, float) and isinstance(answer, float | int):
        if not math.isclose(expected, answer, rel_tol=CLOSE_FRAC, abs_tol=1e-12):
            yield f"{where}: {expected} -> {answer}"
    elif expected != answer:
        yield f"{where}: {str(expected)[:80]} -> {str(answer)[:80]}"


if __name__ == "__main__":
    sys.exit(main())
