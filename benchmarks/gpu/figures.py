"""Figures of RESULTS.md, "On a GPU", that the package computes from the archived samples.

    python benchmarks/gpu/figures.py

prints each row whose printed figures are not the computed ones, with both.  They change with the
models; what was only measured does not change, and stands in RESULTS.md alone.  Exit codes: 0 all
as printed, 1 some not.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import forerun
from forerun.benchmarks.gpu import pairs
from forerun.benchmarks.gpu.kernels import calls_in_step
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.samples.store import read_run, read_table, write_table
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import RunConfig
from forerun.launch.opened._layout_answers import Prediction

MEASURED = Path(__file__).with_name("measured")
RESULTS = Path(__file__).parents[1] / "RESULTS.md"
HEADING = "## On a GPU"
_GIB = 2**30
_HOOKED = (3, 6, 7, 10, 11, 14, 15, 18, 19, 22)
"""Hooked steps of a window of 20 after 3 of warm-up, from 0, as in all archived samples."""
_BARE = tuple(step for step in range(3, 23) if step not in _HOOKED)
_FULL = ("--recompute-granularity", "full")
_SHAPES = {
    "micro-batch halved": ("--micro-batch-size", "1"),
    "micro-batch doubled": ("--micro-batch-size", "4"),
    "half the layers": ("--num-layers", "4"),
    "half the sequence": ("--seq-length", "1024"),
    "full recompute": _FULL,
}
_TOKEN = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?|\binside\b|\boutside\b")
Values = Sequence[float | bool]


class Archives:
    """The archives, unpacked into a folder: figures, logs, and directories that verbs read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for place in sorted(MEASURED.glob("*.tar.gz")):
            with tarfile.open(place) as packed:
                packed.extractall(folder, filter="data")
        for table in folder.glob("h200-*/samples/*.parquet"):
            self._put(table, table.stem)
        for name in ("a", "b"):
            shutil.copytree(folder / f"h200-2026-11-28/megatron-lm-{name}", self.directory(name))
        shutil.copytree(folder / "megatron/b2-records", self.directory("b2") / "records")
        self.run = cache(lambda name: forerun.load(self.directory(name)))
        self.unfused = cache(self._unfused)

    def directory(self, name: str) -> Path:
        """Return the directory of a run, as ``--calibrate-dir`` would name it."""
        return self.folder / "runs" / name

    def _put(self, table: Path, name: str) -> None:
        self.directory(name).mkdir(parents=True)
        shutil.copy(table, self.directory(name) / "samples.parquet")

    def _unfused(self, name: str) -> forerun.Run:
        """Return a run whose samples name the attention that ran, which they did not record."""
        table, target = self.table(name), self.directory(f"{name} unfused")
        config = {"attention": "unfused", "is_softmax_wide": True}
        texts = [json.dumps(json.loads(text) | config) for text in table.runs["config"]]
        target.mkdir()
        write_table(
            target / "samples.parquet", replace(table, runs=table.runs.assign(config=texts))
        )
        return forerun.load(target)

    def figures(self, name: str) -> dict[str, Any]:
        """Return the figures of a measurement, of the later day if there are two."""
        path = max(self.folder.glob(f"h200-*/{name}.json"))
        return json.loads(path.read_text(encoding="utf-8"))["figures"]

    def json(self, path: str) -> Any:
        """Return the JSON of one file."""
        return json.loads((self.folder / path).read_text(encoding="utf-8"))

    def table(self, name: str) -> SampleTable:
        """Return the samples of a run."""
        path = self.directory(name) / "samples.parquet"
        return read_table(path) if path.exists() else build_table(read_run(self.directory(name)))

    def log_s(self, name: str) -> list[float]:
        """Return the step times that Megatron-LM has logged."""
        if name in (runs := self.json("h200-2026-11-28/megatron-lm.json")):
            return runs[name]["steps_s"]
        text = (self.folder / f"megatron/{name}.log").read_text(encoding="utf-8")
        return [float(ms) / 1e3 for ms in re.findall(r"per iteration \(ms\): ([\d.]+)", text)]

    def command(self, name: str) -> list[str]:
        """Return the words of a run of Megatron-LM; ``c`` differs from ``a`` by its model."""
        if name == "c":
            words = self.command("a")
            sizes = self.json("h200-2026-11-28/megatron-lm.json")["c"]["args"]
            return [*words[: words.index("--num-layers")], *sizes, "--train-iters", "40"]
        return self.json(f"h200-2026-11-28/megatron-lm-{name}/command.json")["argv"]


def _percent(frac: float) -> float:
    return 100.0 * frac


def _median(times_s: Sequence[float], places: Sequence[int]) -> float:
    return statistics.median(times_s[place] for place in places)


def _hooked(name: str) -> Callable[[Archives], Values]:
    def values(data: Archives) -> Values:
        cost = Measurements(table=data.table(name)).overhead
        assert cost is not None
        return [_percent(one) for one in (cost.overhead_frac, cost.low_frac, cost.high_frac)]

    return values


def _hooked_waiting(data: Archives) -> Values:
    waiting = data.figures("overhead")["launch_bound_waiting_frac"]
    waits = waiting, Measurements(table=data.table("launch_bound")).launch_bound_frac
    return (*_hooked("launch_bound")(data), *map(_percent, waits))


def _megatron_steps(data: Archives) -> Values:
    runs = [Measurements(table=data.table(name)) for name in ("a", "b")]
    return [v for run in runs for v in (run.step_s, _percent(run.launch_bound_frac))]


def _megatron_hooks(data: Archives) -> Values:
    result: list[float] = []
    for name in ("a", "b"):
        hooks = Measurements(table=data.table(name)).hooks
        result += [hooks.num_fired, hooks.num_installed, *_hooked(name)(data)]
    return result


def _options(config: RunConfig) -> tuple[str, ...]:
    """Return the options that tell the archived shapes of the recipe apart."""
    model, batch = config.model, config.batch
    sizes = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--seq-length": model.seq_length,
        "--max-position-embeddings": model.max_position_embeddings,
        "--micro-batch-size": batch.micro_batch_size,
        "--global-batch-size": batch.global_batch_size,
    }
    return tuple(word for name, size in sizes.items() for word in (name, str(size)))


def _error(prediction: Prediction, measured_s: float) -> tuple[float, bool]:
    is_inside = prediction.low_s <= measured_s <= prediction.high_s
    return _percent(prediction.step_time_s / measured_s - 1), is_inside


def _interval(prediction: Prediction) -> tuple[float, float, float]:
    return prediction.step_time_s, prediction.low_s, prediction.high_s


def _allocated_nbytes(prediction: Prediction) -> int:
    """Return the predicted peak of the allocator: without context and buffers of libraries."""
    return prediction.memory.total_nbytes - prediction.memory.overhead_nbytes


def _peak_nbytes(table: SampleTable) -> int:
    return Measurements(table=table).memory_peak_nbytes


def _model_memory(run: forerun.Run, table: SampleTable) -> tuple[float, float, float]:
    """Return GiB by the model alone and measured, and the difference in percent."""
    prediction = run.predict(())
    model = _allocated_nbytes(prediction) - prediction.memory.offset_nbytes
    peak = _peak_nbytes(table)
    return model / _GIB, peak / _GIB, _percent(model / peak - 1)


def _layer_launches_s(table: SampleTable) -> float:
    """Return the seconds of a layer's forward operators, which are the host's if launch-bound."""
    config, rows = table.config(), table.newest("samples")
    forward = rows[(rows["row"] == "operator") & (rows["phase"] == "forward")]
    calls = calls_in_step(config)
    passes = config.model.num_layers * config.num_microbatches
    return sum(
        row.time_s * (calls[f"{row.kind} {row.phase} {row.shape}"] // passes)
        for row in forward.itertuples()
    )


def _across(data: Archives) -> Values:
    names = ("recipe", "compute_bound", "launch_bound")
    tables = {name: data.table(name) for name in names}
    measured_s = {name: Measurements(table=table).step_s for name, table in tables.items()}
    options = {name: _options(table.config()) for name, table in tables.items()}

    def between(
        source: str, target: str, *, run: Callable[[str], forerun.Run] = data.unfused
    ) -> tuple[Prediction, tuple[float, bool]]:
        prediction = run(source).predict(options[target])
        return prediction, _error(prediction, measured_s[target])

    recipe, wide, narrow = names
    forth, forth_error = between(recipe, wide)
    back_error = between(wide, recipe)[1]
    slow = [between(name, narrow) for name in (recipe, wide)]
    archived, archived_error = between(recipe, narrow, run=data.run)
    memory = _percent(_allocated_nbytes(archived) / _peak_nbytes(tables[narrow]) - 1)
    return (
        forth_error[0], forth.low_s, forth.high_s, measured_s[wide], forth_error[1],
        *back_error,
        *(v for one, error in slow for v in (*_interval(one), *error)), measured_s[narrow],
        1e3 * _layer_launches_s(tables[narrow]),
        *_interval(archived), *archived_error, memory,
        *(v for target in (wide, recipe) for one, error in (between(narrow, target),)
          for v in (error[0], one.low_s, one.high_s, measured_s[target], error[1])),
    )  # fmt: skip


def _across_memory(data: Archives) -> Values:
    names = ("recipe", "compute_bound", "launch_bound")
    known = [_model_memory(data.unfused(name), data.table(name)) for name in names]
    return *(peak for _, peak, _ in known), *(error for *_, error in known)


def _shape_errors(data: Archives) -> Iterator[tuple[float, float]]:
    rows = {row[0]: row for row in data.figures("shapes")["layouts"]["rows"]}
    for name, options in _SHAPES.items():
        prediction = data.run("base").predict(options)
        measured_s, peak_gib = (float(rows[name][i].split()[0]) for i in (3, 6))
        memory = _percent(_allocated_nbytes(prediction) / _GIB / peak_gib - 1)
        yield _error(prediction, measured_s)[0], memory


def _shape_steps(data: Archives) -> Values:
    errors = [step for step, _ in _shape_errors(data)]
    return *errors, statistics.mean(map(abs, errors))


def _modelled(data: Archives, name: str) -> Iterator[float]:
    """Yield the modelled step, its interval and its error in percent, as ``report`` prints them."""
    text = "\n".join(data.run(name).report().transcript)
    pattern = r"checked: model ([\d.]+) s \(([\d.]+) s to ([\d.]+) s\), ([\d.]+) % off"
    yield from map(float, re.findall(pattern, text)[0])


def _modelled_steps(data: Archives) -> Values:
    return [
        v for name in ("a", "b") for place, v in enumerate(_modelled(data, name)) if place % 3 == 0
    ]


def _each_other(data: Archives) -> Values:
    result: list[float | bool] = []
    for source, target in (("b", "a"), ("a", "b")):
        prediction = data.run(source).predict(command=data.command(target))
        result += [
            *_interval(prediction),
            *_error(prediction, Measurements(table=data.table(target)).step_s),
        ]
    return result


def _repeated_modelled(data: Archives) -> Values:
    step_s, low_s, high_s, off = _modelled(data, "b2")
    return step_s, low_s, high_s, Measurements(table=data.table("b2")).step_s, off


def _larger_from_repeated(data: Archives) -> Values:
    prediction = data.run("b2").predict(command=data.command("a"))
    return *_interval(prediction), *_error(prediction, Measurements(table=data.table("a")).step_s)


def _recomputed(data: Archives) -> Values:
    words = (*_FULL, "--recompute-method", "uniform", "--recompute-num-layers", "1")
    prediction = data.run("a").predict(words)
    without_s, with_s = (_median(data.log_s(name), _BARE) for name in ("a", "a-full"))
    text = (data.folder / "megatron/a-full.log").read_text(encoding="utf-8")
    peak_gib = max(float(mib) for mib in re.findall(r"max allocated: ([\d.]+)", text)) / 1024
    gib = _allocated_nbytes(prediction) / _GIB
    error, is_inside = _error(prediction, with_s)
    gains = prediction.time_frac or 0.0, with_s / without_s - 1
    # All steps but two of warm-up and the traced one.
    every = tuple(step for step in range(2, 26) if step != 23)
    all_s = [_median(data.log_s(name), every) for name in ("a", "a-full")]
    return (
        *_interval(prediction), with_s, error, is_inside, *map(_percent, gains),
        _error(prediction, all_s[1])[0], _percent(all_s[1] / all_s[0] - 1),
        gib, peak_gib, _percent(gib / peak_gib - 1),
    )  # fmt: skip


def _like_llama(data: Archives) -> Values:
    prediction = data.run("a").predict(command=data.command("c"))
    steps_s = data.log_s("c")
    measured_s = _median(steps_s, _BARE)
    error, is_inside = _error(prediction, measured_s)
    every_s = _median(steps_s, [*range(2, 23), *range(24, 40)])
    return *_interval(prediction), measured_s, error, is_inside, _error(prediction, every_s)[0]


def _each_pair(_: Archives) -> Values:
    tables = pairs.read_tables()
    found = (pairs.pairs(tables, is_alone=is_alone) for is_alone in (False, True))
    return [value for one in found for value in pairs.sums([*one]).values()]


COMPUTED: dict[str, Callable[[Archives], Values]] = {
    "hooked against bare steps, hidden 4096": _hooked("compute_bound"),
    "the same, hidden 1024, launch-bound": _hooked_waiting,
    "step; the device waits for the host in": _megatron_steps,
    "hooks that fired; their cost of a hooked step": _megatron_hooks,
    "other shapes from one calibration, step": _shape_steps,
    "the same, peak memory": lambda data: [memory for _, memory in _shape_errors(data)],
    "**Predicted from one of the three runs, the others measured** (recipe; wide: hidden 4096; "
    "narrow: hidden 1024, 512 positions, launch-bound)": _across,
    "**Peak memory**, as told by the model alone, of recipe, wide and narrow, "
    "with that attention": _across_memory,
    "**Each of six layouts from each other one** (`python benchmarks/gpu/pairs.py`; far off and "
    "clear: by 10 %, large: by 5 %)": _each_pair,
    "modelled step": _modelled_steps,
    "peak memory by the model alone, measured": lambda data: [
        value for name in ("a", "b") for value in _model_memory(data.run(name), data.table(name))
    ],
    "predicted from the other's samples": _each_other,
    "full recompute of the 1.3B, from its run without": _recomputed,
    "a model like Llama from the 1.3B (16 x 4096, grouped queries, SwiGLU, mbs 1 of 4, "
    "4,096 positions)": _like_llama,
    "modelled step, measured": _repeated_modelled,
    "the 1.3B from it": _larger_from_repeated,
}
"""Row of RESULTS.md, by its first cell: what today's package says of the archived samples, in the
order of the row."""


def section() -> list[str]:
    """Return the lines of RESULTS.md on a GPU."""
    text = RESULTS.read_text(encoding="utf-8").partition(f"\n{HEADING}\n")[2]
    return text.partition("\n## ")[0].splitlines()


def rows(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield first cell and figures of each row of the tables, without heads and bars."""
    head: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or line.startswith("|---"):
            continue
        if following.startswith("|---"):
            head = cells
        else:
            yield cells[0], " | ".join(cells[1 : -1 if head[-1] == "bar" else None])


def printed(figures: str) -> list[str]:
    """Return the numbers and verdicts in a row's figures.

    >>> printed("-19.2 %, inside; 1,700 us")
    ['-19.2', 'inside', '1700']
    """
    return [token.replace(",", "") for token in _TOKEN.findall(figures)]


def is_as_printed(token: str, value: float | bool) -> bool:
    """Return True if a value rounds to what is printed.

    >>> is_as_printed("+2.0", 1.96), is_as_printed("2", -2.0), is_as_printed("inside", False)
    (True, False, False)
    """
    if isinstance(value, bool) or token in ("inside", "outside"):
        return value is (token == "inside")
    half = 0.5 * 10.0 ** -len(token.partition(".")[2])
    return abs(float(token) - value) <= half * (1.0 + 1e-6)


def differences(name: str, figures: str, values: Values) -> list[str]:
    """Return what is printed and what was computed, for each figure of a row that differs."""
    tokens = printed(figures)
    if len(tokens) != len(values):
        return [f"{name}: prints {len(tokens)} figures, {len(values)} are computed: {values}"]
    pairs = zip(tokens, values, strict=True)
    return [
        f"{name}: {token} is {value:.6g}"
        for token, value in pairs
        if not is_as_printed(token, value)
    ]


def main() -> int:
    """Compare all rows; return 1 if one differs."""
    result = []
    with tempfile.TemporaryDirectory() as folder:
        data = Archives(Path(folder))
        known = dict(rows(section()))
        for name, values in COMPUTED.items():
            result += differences(name, known[name], values(data))
    print("\n".join(result) or "all figures as printed")
    return int(bool(result))


if __name__ == "__main__":
    sys.exit(main())
