"""Steps of training logs: formats of Megatron-LM and its forks, prefixes, restarts, damage."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import RecordError
from forerun.calib.importers.training_log import TrainingLog, read_training_log

PUBLIC = {
    # NVIDIA/Megatron-LM core_v0.16.1, --log-throughput
    "core_v0.16.1": (
        " [2026-11-29 01:35:13.536627] iteration       10/    1000 | consumed samples:           "
        "80 "
        "| elapsed time per iteration (ms): 125.8 | throughput per GPU (TFLOP/s/GPU): 12.5 | "
        "learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 8.5E+00 | "
        "loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations:   1 | "
        "number of nan iterations:   0 |",
        (10, 1000, 0.1258, 8, 1, 12.5),
    ),
    # epfLLM/Megatron-LLM, issue 11
    "Megatron-LLM": (
        " iteration        5/    2000 | consumed samples:          320 | elapsed time per "
        "iteration "
        "(ms): 11075.6 | learning rate: 5.000E-07 | global batch size:    64 | lm loss: 1.79E+00 |",
        (5, 2000, 11.0756, 64, 0, 0.0),
    ),
    # bigscience-workshop/Megatron-DeepSpeed, tr1-13B: seconds, and one field more
    "Megatron-DeepSpeed": (
        "[default7]: iteration   159260/  311541 | consumed samples:    167712576 | consumed "
        "tokens: 343475355648 | elapsed time per iteration (s): 105.33 | learning rate: 5.1E-05 | "
        "global batch size:  2048 | lm loss: 2.39E+00 | grad norm: 0.2 | num zeros: 0.0 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: "
        "19.443 | TFLOPs: 153.93 |",
        (159260, 311541, 105.33, 2048, 0, 153.93),
    ),
    # AMD-AGI/Primus: newest value and mean, in colour
    "Primus": (
        "\x1b[32m[20251012 08:01:02][rank-7/8]\x1b[0m iteration       20/      50 | consumed "
        "samples:         2560 | elapsed time per iteration (ms): 5123.1/5201.7 | hip mem usage/"
        "free: 150GB/40GB | throughput per GPU (TFLOP/s/GPU): 601.2/592.1 | "
        "global batch size:   128 | lm loss: 7.1E+00 |",
        (20, 50, 5.1231, 128, 0, 601.2),
    ),
    # THUDM and NeoX forks: 'batch' in place of iteration
    "capitals": (
        "0: Iteration 100/500000 | elapsed time per iteration (ms): 1,234.5 | learning rate: 6E-06 "
        "| global batch size: 1,024 |",
        (100, 500000, 1.2345, 1024, 0, 0.0),
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_line_of_a_public_log(name: str) -> None:
    text, (iteration, total, time_s, batch, skipped, tflops) = PUBLIC[name]
    log = read_training_log([text], name)
    (line,) = log.lines
    assert (line.iteration, log.num_steps, line.global_batch_size) == (iteration, total, batch)
    assert (line.num_skipped, line.tflops_per_gpu) == (skipped, tflops)
    assert line.time_s == pytest.approx(time_s)


TAIL = "number of skipped iterations:   0 | number of nan iterations:   0 |"
FORKS = {
    # NVIDIA/Megatron-LM core_v0.16.1, megatron/training/training.py, as printed by a run on CPUs
    "Number of parameters in transformer block in billions:  0.00 [2026-11-29 01:33:54.656384] "
    "iteration        1/     800 | consumed samples:            8 | elapsed time per iteration "
    "(ms): 64.3 | learning rate: 1.000000E-03 | global batch size:     8 | lm loss: 8.3E+00 | "
    + TAIL: (1, 800, 0.0643, 8),
    # epfLLM/Megatron-LLM, issue 11
    " iteration      122/  250000 | consumed samples:       124928 | elapsed time per iteration "
    "(ms): 86545.2 | learning rate: 9.150E-06 | global batch size:  1024 | lm loss: 2.50E+00 | "
    + TAIL: (122, 250000, 86.5452, 1024),
    # bigscience-workshop/bigscience, train/tr11-176B-ml
    " [default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  "
    "20155564032 | elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch"
    f" size:  2048 | lm loss: 2.46E+00 | {TAIL} samples per second: 19.463 | TFLOPs: 149.02 |": (
        12695,
        115311,
        105.22,
        2048,
    ),
    # AMD-AGI/Primus: this line's mean and the mean of the run
    "[rank-7/8] iteration  4700/ 4768 | elapsed time per iteration (ms): 1460.8/1450.4 | global "
    "batch size:    16 |": (4700, 4768, 1.4608, 16),
    # the form of gpt-neox: the rate comes before the iteration
    "[2023-05-05 11:00:12,123] [INFO] samples/sec: 53.753 | iteration      199/  317892 | elapsed "
    "time per iteration (ms): 14287.5 | learning rate: 2.407E-04 |": (199, 317892, 14.2875, 768),
    # a fork that misspells a word
    " iteration  11/50000 | consumed samples: 5632 | elapsed time per iteration (ms):  52728.1 | "
    "gloabl batch size:  512 | lm loss:  1.376514E+01 |": (11, 50000, 52.7281, 512),
    # a log as a search engine returns it
    '"message": "[2024-02-27 15:45:08] iteration 13 / 118 | consumed samples: 37440 | elapsed time '
    'per iteration(ms): 17658.3 | global batch size: 2880 |",': (13, 118, 17.6583, 2880),
    # in colour, with a launcher's tag
    "\x1b[32m[default0]: [2026-09-11 12:07:17.375194] iteration        4/ 7629408 | consumed "
    "samples:          128 | elapsed time per iteration (ms): 24386.9 | throughput per GPU "
    "(TFLOP/s/GPU): 26.8 | global batch size:    32 |\x1b[0m": (4, 7629408, 24.3869, 32),
    # the form of NeMo, which counts from 0
    " 0: Training epoch 0, iteration 28/99 | lr: 5.6e-06 | global_batch_size: 32 | global_step: 28 "
    "| reduced_train_loss: 2.778 | train_step_timing in s: 0.189 | consumed_samples: 928 |": (
        29,
        100,
        0.189,
        32,
    ),
    # the form of nanotron, which shortens its numbers
    "08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]: iteration: 1 / 15 | consumed_tokens: 512 | "
    "elapsed_time_per_iteration_ms: 4.71K | tokens_per_sec: 109 | global_batch_size: 2 | lm_loss: "
    "5.32 |": (1, 15, 4.71, 2),
    # awslabs/awsome-distributed-training
    "   iteration        1/  508626 | consumed samples:          288 | elapsed time per iteration "
    "(ms): 255940.5 | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 4294967296 "
    "| number of skipped iterations:   1 | number of nan iterations:   0 |": (
        1,
        508626,
        255.9405,
        288,
    ),
}


@pytest.mark.parametrize("text", FORKS)
def test_lines_of_forks_are_read(text: str) -> None:
    log = read_training_log([text], "log")
    (one,) = log.lines
    iteration, total, time_s, batch = FORKS[text]
    assert (one.iteration, log.num_steps, one.global_batch_size) == (iteration, total, batch)
    assert one.time_s == pytest.approx(time_s)


def line(at: int, time_ms: float, total: int = 1000) -> str:
    return (
        f" iteration {at:8d}/{total:8d} | elapsed time per iteration (ms): {time_ms:.1f} | x: 1 |"
    )


PREFIXES = (
    "",
    "0: ",
    "[1,3]<stdout>:",
    "[default7]:",
    "node-3: ",
    "2026-11-29T01:02:03.5Z stdout F ",
)
OTHERS = (
    "",
    "training ...",
    "    evaluate .......................................: (71.19, 71.78)",
    " validation loss at iteration 50 | lm loss value: 7.4E+00 | lm loss PPL: 1.6E+03 | ",
    "[before the start of training step] datetime: 2026-11-29 01:35:12 ",
    "iteration",
    " iteration 7/ | elapsed time per iteration (ms): 3 |",
    "x" * 9000,
)


@settings(max_examples=100, deadline=None)
@given(
    times=st.lists(st.integers(1, 100_000), min_size=2, max_size=20),
    interval=st.sampled_from([1, 5, 100]),
    prefix=st.sampled_from(PREFIXES),
    copies=st.integers(1, 3),
    others=st.lists(st.sampled_from(OTHERS), max_size=10),
)
def test_prefixes_copies_and_other_lines_change_nothing(
    times: list[int], interval: int, prefix: str, copies: int, others: list[str]
) -> None:
    plain = [line(interval * (i + 1), time_ms) for i, time_ms in enumerate(times)]
    expected = read_training_log(["\n".join(plain)], "plain")
    noisy: list[str] = []
    for place, text in enumerate(plain):
        noisy += others[place : place + 1]
        noisy += [prefix + text] * copies
    result = read_training_log(["\n".join(noisy)], "noisy")
    assert [(o.iteration, o.num_iterations, o.time_s) for o in result.lines] == [
        (o.iteration, o.num_iterations, o.time_s) for o in expected.lines
    ]
    assert [o.time_s for o in expected.lines] == [time_ms / 1000 for time_ms in times]
    assert all(o.num_iterations == interval for o in expected.lines)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_log_that_is_cut_anywhere_has_the_steps_before_the_cut(data: st.DataObject) -> None:
    """Its last line may still be written, and half a number is another number."""
    tail = "global batch size:    64 | lm loss: 7.1E+00 | number of nan iterations:   0 |"
    text = "\n".join(f"{line(at, 480.0 + at)} {tail}" for at in range(1, 6)) + "\n"
    whole = read_training_log([text], "whole").lines
    start = text.index("\n")
    part = read_training_log([text[: data.draw(st.integers(start, len(text)))]], "part").lines
    for one, other in zip(part, whole, strict=False):
        assert (one.iteration, one.time_s, one.global_batch_size) == (
            *(other.iteration, other.time_s),
            64,
        )


_DAMAGE = st.sampled_from(["nan", "1e999", "9" * 400, "-1", "", "[1,", "None", "0", "|", "word"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), _DAMAGE), min_size=1, max_size=8))
def test_damage_is_left_out_and_the_rest_is_read(damages: list[tuple[int, str]]) -> None:
    head = "  world_size ......... 8\n  eval_interval ......... 100\n  log_interval ......... 1\n"
    tail = (
        "consumed samples: 64 | global batch size: 64 | TFLOP/s: 9.5 |\n  evaluate ...: (1.0, 2.5)"
    )
    text = head + "\n".join(f"{line(at, 480.0)} {tail}" for at in range(1, 9)) + "\n"
    words = text.split(" ")
    for place, word in damages:
        words[place % len(words)] = word
    with suppress(RecordError):
        log = read_training_log([" ".join(words)], "damaged")
        for one in log.lines:
            assert 0.0 < one.time_s < 1e7 and 0 <= one.samples < 1e18 > one.tflops_per_gpu
        assert all(0.0 <= time_s < 1e18 for _, _, time_s in log.phases)
        assert str(log.arguments.get("world_size", 8)).isdecimal()
        assert log.notes is not None


def test_an_argument_that_is_no_number_is_named() -> None:
    log = read_training_log([f"  eval_iters ......... nan\n{line(1, 5.0)}\n"], "log")
    (problem,) = log.problems
    assert problem.startswith("--eval-iters 'nan' of the log is not a whole number")
    assert "eval_iters" not in log.arguments


def test_a_restart_runs_iterations_again() -> None:
    first = [line(at, 100.0) for at in (10, 20, 30, 40)]
    second = [line(at, 200.0) for at in (30, 40, 50)]
    for texts in (["\n".join(first + second)], ["\n".join(first), "\n".join(second)]):
        log = read_training_log(texts, "two launches")
        assert [(o.iteration, o.time_s) for o in log.lines] == [
            *((10, 0.1), (20, 0.1)),
            *((30, 0.2), (40, 0.2), (50, 0.2)),
        ]


def test_the_first_line_is_of_one_interval() -> None:
    """A resumed run logs its first line one interval after its start; Megatron also logs the very
    first iteration."""
    resumed = read_training_log(["\n".join(line(at, 5.0) for at in (5010, 5020))], "resumed")
    assert [o.num_iterations for o in resumed.lines] == [10, 10]
    fresh = read_training_log(["\n".join(line(at, 5.0) for at in (1, 10, 20))], "fresh")
    assert [o.num_iterations for o in fresh.lines] == [1, 9, 10]


def test_arguments_and_timers_are_read() -> None:
    text = (
        "  log_interval .................................... 10\n"
        "  recompute_modules ............................... ['core_attn', 'mlp']\n"
        "  bf16 ............................................ True\n"
        f"  save ............................................ None\n{line(10, 5)}\n"
        "    save-checkpoint ................................: (21.52, 2209.0)\n"
    )
    log = read_training_log([text], "log")
    assert log.arguments["bf16"] is True and log.arguments["save"] is None
    assert log.arguments["recompute_modules"] == ["core_attn", "mlp"]
    assert log.phases == ((10, "save-checkpoint", 2.209),)


def notes(times: list[float]) -> str:
    text = "\n".join(line(10 * (i + 1), time_ms) for i, time_ms in enumerate(times))
    return " ".join(read_training_log([text], "log").notes)


def test_growing_times_are_named() -> None:
    assert "slower: 11.076 s up to 5, 14.643 s from 10" in " ".join(growing().notes)
    assert "slower" in notes([900.0, 100.0, 110.0, 120.0, 130.0])
    assert notes([900.0, 100.0, 101.0, 99.0, 100.0]) == ""


def growing() -> TrainingLog:
    text = f"{line(5, 11075.6, 2000)}\n{line(10, 14642.7, 2000)}"
    return read_training_log([text], "epfLLM/Megatron-LLM issue 11")


def test_numbers_that_no_run_has_are_left_out() -> None:
    texts = [line(10, 5.0), line(20, 5.0, total=10**40), line(30, 0.0), line(40, 1e30)]
    log = read_training_log(["\n".join(texts)], "log")
    assert [one.iteration for one in log.lines] == [10]
    assert log.problems == ("3 lines of iterations cannot be read, and are left out",)


def test_ranks_that_print_other_times_count_once() -> None:
    texts = [line(at, 100.0 + rank) for at in (10, 20, 30) for rank in range(4)]
    log = read_training_log(["\n".join(texts)], "log")
    assert [(one.iteration, one.time_s) for one in log.lines] == [
        (at, 0.103) for at in (10, 20, 30)
    ]


def test_a_file_without_steps_is_refused() -> None:
    with pytest.raises(RecordError, match="elapsed time per iteration"):
        read_training_log(["nothing\nof it"], "notes.txt")
