"""Layouts of one model trained in turn in one process, after predictions of them were written.

``base`` calibrates, ``predictions`` writes what ``forerun predict`` and ``forerun plan`` say of
each layout, ``sweep`` measures them, ``shards`` measures single ranks of several under the fake
process group.  ``scores.py`` compares.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.benchmarks.gpu.bench import Bench
from forerun.benchmarks.gpu.launches import calibrated, has_engine, words_of
from forerun.benchmarks.gpu.layouts import (
    BASE,
    LAYOUTS,
    OF_ENGINE,
    PP,
    SHARDS,
    digest,
)
from forerun.benchmarks.gpu.megatron_runs import BLOCKED, WARMUP, Megatron, TimeIsUp
from forerun.hooks.adapters._megatron_model import timer_holders
from forerun.hooks.process.guard import Guard
from forerun.hooks.process.host import Host, WeakHost
from forerun.hooks.sensors.process_groups import ProcessGroupHooks
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.timers import TimerHooks
from forerun.hooks.session.instruments import Instruments

_SPAN = 4
"""Layouts between two runs of the base."""
_BETWEEN_S, _END_S = 2.0, 8.0


def layouts(bench: Bench) -> dict[str, tuple[str, ...]]:
    """Return the layouts that this machine can train."""
    is_whole = has_engine(bench)
    return {k: v for k, v in LAYOUTS.items() if is_whole or not k.startswith(OF_ENGINE)}


def base(bench: Bench) -> None:
    """Calibrate the base as a user would, and keep its records."""
    calibrated(bench, BASE, words_of(bench), num_steps=34)


def predictions(bench: Bench) -> None:
    """Write what Forerun says of each layout from the base's records, before any is measured.

    ``offers`` are the plan's first three rows and its last, by the names of their layouts.
    """
    from forerun.launch.opened.run import load

    folder = bench.work.parent / BASE / BASE
    run = load(folder)
    plan = run.plan(top=100).to_json()
    rows = plan["candidates"]
    bench.put(plan=plan, base_step_s=plan["measured_step_time_s"])
    words = {BASE: (), **layouts(bench)}
    answers = {name: _answer(run, options) for name, options in words.items()}
    known = {_identity(answer): name for name, answer in reversed(answers.items())}
    offers = []
    for row in [*rows[:3], *rows[3:][-1:]]:
        name = known.get(_identity(row))
        if name is None:
            name = f"offered: {row['label']}"
            words[name], answers[name] = tuple(row["options"]), row
        offers.append(name)
    bench.put(words=words, layouts=answers, offers=offers, shards=_predicted_shards(folder))
    bench.put(made_unix_s=time.time())
    bench.why = f"sha256 {digest(bench.figures)}"


def _answer(run: Any, options: Sequence[str]) -> dict[str, Any]:
    try:
        return run.predict(options).to_json()
    except Exception as err:  # a refusal is an answer
        return {"refused": f"{type(err).__name__}: {err}"[:300]}


def _identity(answer: Mapping[str, Any]) -> tuple[Any, ...]:
    return answer.get("label"), answer.get("step_time_s")


def _predicted_shards(folder: Path) -> dict[str, Any]:
    """Return predicted device seconds of one micro-batch's passes on each shard, untransferred."""
    from forerun.calib.arguments.megatron_args import apply_options
    from forerun.calib.fit.calibration import calibrate
    from forerun.calib.layers.stage_work import stage_operators
    from forerun.launch.known.runs import load

    table = load(folder, None).table
    running = table.config()
    known = calibrate(table, device=running.device)
    answers: dict[str, Any] = {}
    for name, (num_ranks, rank, options) in SHARDS.items():
        try:
            config = apply_options(running, (*options, "--gpus", str(num_ranks)))
            work = stage_operators(config, rank if PP in options else 0)
            answers[name] = {
                f"{phase}_s": float(
                    sum(t * n for t, (_, n) in zip(_times(known, ops), ops, strict=True))
                )
                for phase, ops in (("forward", work.forward), ("backward", work.backward))
            }
        except Exception as err:
            answers[name] = {"refused": f"{type(err).__name__}: {err}"[:300]}
    return answers


def _times(known: Any, counted: Sequence[Any]) -> Sequence[float]:
    return known.operators([operator for operator, _ in counted]).time_s


class Cases:
    """Runs of one measurement in turn, while another one of the longest still fits its time."""

    def __init__(self, bench: Bench) -> None:
        bench.begin_device()
        self._bench, self._megatron = bench, Megatron(bench)
        self._spent_s: list[float] = []

    def fits(self, until_s: float = 0.0) -> bool:
        """Return True if a run ends before ``until_s`` seconds are left."""
        # Half of the first is spent on imports.
        longest_s = max(self._spent_s[1:], default=sum(self._spent_s) / 2)
        return self._bench.remaining_s - until_s > longest_s + _BETWEEN_S

    def run(self, words: Sequence[str], **options: Any) -> dict[str, Any]:
        """Train a layout; return its figures, or its problem."""
        begun_s = time.monotonic()
        try:
            return self._megatron.layout(words, **options).figures
        except (Exception, SystemExit) as err:
            return {"problem": f"{type(err).__name__}: {err}"[:300]}
        finally:
            self._spent_s.append(time.monotonic() - begun_s)


def sweep(bench: Bench) -> None:
    """Train each layout in two rounds of opposite order, with the base between them.

    A layout that fails is not trained again, nor one that ended the process before this one.
    """
    written = bench.figures_of("predictions")
    bench.put(predictions_sha256=digest(written) if written else None)
    bench.figures.setdefault("begun_unix_s", time.time())
    wanted = {BASE: (), **written.get("words", layouts(bench))}
    order, offers = [BASE], written.get("offers", ())
    # Offers first: they alone tell the regret.
    names = sorted({*wanted} - {BASE}, key=lambda name: (name not in offers, [*wanted].index(name)))
    for place, name in enumerate(names, 1):
        order += [name, BASE] if place % _SPAN == 0 or place == len(names) else [name]
    runs: list[dict[str, Any]] = bench.figures.setdefault("runs", [])
    failed = {run["name"] for run in runs if "problem" in run} | {bench.figures.get("running")}
    failed -= {BASE}  # nothing can be said without it
    done = {(run["name"], run["round"]) for run in runs if run["name"] != BASE}
    cases, half_s = Cases(bench), bench.remaining_s / 2
    trained: list[str] = []
    for number, until_s in ((1, half_s), (2, 0.0)):
        for name in order if number == 1 else trained[::-1]:
            if name in failed or (name == BASE and runs and runs[-1]["name"] == BASE):
                continue
            if (name, number) in done:
                trained += [name] * (number == 1)
                continue
            if not cases.fits(until_s):
                break
            bench.put(running=name)
            row = {"name": name, "round": number, "begun_unix_s": time.time()}
            words = [*words_of(bench), *wanted[name]]
            row |= cases.run(words, num_blocked=BLOCKED if number == 1 else 0)
            runs.append(row)
            bench.put(runs=runs, running=None)
            if "problem" in row and name != BASE:
                failed.add(name)
            elif number == 1:
                trained.append(name)


def shards(bench: Bench) -> None:
    """Measure single ranks of TP and PP layouts; nothing is transferred."""
    cases, figures = Cases(bench), {}
    for name, (num_ranks, rank, options) in SHARDS.items():
        if cases.fits():
            words = [*words_of(bench), *options, "--global-batch-size", "4"]
            words += ["--fake-process-group"]
            figures[name] = cases.run(words, rank=rank, num_ranks=num_ranks, num_bare=4)
            bench.put(shards=figures)


def _instruments(models: Any, optimizer: Any, **options: Any) -> Instruments:
    holders = timer_holders(models, (optimizer,))
    real = Host(models=tuple(models), optimizers=(optimizer,), timer_holders=holders)
    return Instruments(WeakHost(real), Guard(), num_steps=10, **options)


def turns(bench: Bench) -> None:
    """Train a launch-bound model, one step each with other parts of the hooks, in random turns."""
    bench.begin_device()
    times_s: dict[str, list[float]] = {}
    passes = tuple(range(4))
    variants: list[str] = []
    state: dict[str, Any] = {}

    @contextmanager
    def around(number: int, models: Any, optimizer: Any) -> Iterator[None]:
        now_s = time.perf_counter()
        if variant := state.pop("variant", None):
            times_s.setdefault(variant, []).append(now_s - state["begun_s"])
        if bench.remaining_s < _END_S:
            raise TimeIsUp
        if "parts" not in state:
            state["parts"] = _parts(models, optimizer, passes)
        if log := state.pop("log", None):
            log.drop()
        if number < WARMUP:
            yield
            return
        if not variants:
            variants.extend(random.Random(number).sample([*state["parts"]], len(state["parts"])))
            bench.put(steps_s=times_s)
        variant = variants.pop()
        put_on, take_off = state["parts"][variant]
        state.update(variant=variant, begun_s=time.perf_counter())
        put_on(number)
        yield
        state["log"] = take_off()

    words = words_of(bench, hidden=1024, seq=1024, layers=12)
    Megatron(bench).train(words, 4000, around)
    bench.put(steps_s=times_s)


def _parts(models: Any, optimizer: Any, passes: tuple[int, ...]) -> dict[str, tuple[Any, Any]]:
    """Return what puts each variant on before a step, and what takes it off after it."""

    def whole(
        instruments: Instruments, *, is_at_once: bool = False, first: int | None = None
    ) -> Any:
        def put_on(number: int) -> None:
            if first is not None:
                instruments.num_hooked = first
            instruments.put_on(step=number, window=0)
            if is_at_once:
                instruments.take_off()

        return put_on, (lambda: None) if is_at_once else instruments.take_off

    def alone(kind: Any, *places: Any) -> Any:
        recorder = _instruments(models, optimizer).recorder
        hooks = kind(recorder, Guard())

        def put_on(number: int) -> None:
            hooks.install(*places)
            recorder.open(StepLog(step=number, window=0, sites=()))

        def take_off() -> Any:
            log = recorder.close()
            hooks.remove()
            return log

        return put_on, take_off

    sampled = _instruments(models, optimizer, microbatches=passes)
    # No pass has the micro-batch whose turn it is.
    unsampled = _instruments(models, optimizer, microbatches=(passes[-1],) * len(passes))
    return {
        "bare": (lambda _: None, lambda: None),
        "hooked": whole(sampled),
        "nothing sampled": whole(unsampled, first=0),
        "put on and off alone": whole(_instruments(models, optimizer), is_at_once=True),
        "without operators": whole(_instruments(models, optimizer, has_operators=False)),
        "process groups alone": alone(ProcessGroupHooks),
        "timers alone": alone(TimerHooks, timer_holders(models, (optimizer,))),
    }


def moe(bench: Bench) -> None:
    """Calibrate eight experts behind an all-to-all of one rank."""
    experts = ["--num-experts", "8", "--moe-router-topk", "2", "--moe-token-dispatcher-type"]
    experts += ["alltoall", "--moe-router-load-balancing-type", "aux_loss"]
    experts += ["--moe-aux-loss-coeff", "1e-2"]
    if has_engine(bench):
        experts += ["--moe-grouped-gemm"]
    words = words_of(bench, hidden=1024, seq=2048, layers=8)
    calibrated(bench, "moe", [*words, *experts], num_steps=28)
