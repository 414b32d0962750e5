"""Drawn loops and ways to compile, as their scripts print them: a few of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.benchmarks import hands

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow


def run_script(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ways_to_compile_are_what_they_were() -> None:
    """Run one way; ``test_provocations.py`` trains each of the others."""
    done = run_script("compiled.py", "--ways", "late", "--stances", "default")
    assert "0 of 1 differ" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "| late | eager | default |" in done.stdout and "| no difference |" in done.stdout
    assert done.returncode == 0


def test_drawn_loops_are_counted_and_do_not_differ() -> None:
    done = run_script("hands.py", "--loops", 2, "--launches", 1, "--seed", 1)
    starts = ("| one process | 1 | 2 |", "| launches | 1 | 1 |", "| act | one process | launches |")
    lines = done.stdout.splitlines()
    assert all(sum(line.startswith(start) for line in lines) == 1 for start in starts)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_seed_draws_the_same_loops_again() -> None:
    first, second = hands.drawn_loops(5, 7), hands.drawn_loops(5, 7)
    assert first == second and first != hands.drawn_loops(5, 8)
    assert all(len(loop) >= 3 for loop in first)
    assert sum(hands.counts(first).values()) == sum(map(len, first))
