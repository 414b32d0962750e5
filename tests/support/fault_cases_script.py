"""Faults of the user's script, and how it ends."""

from __future__ import annotations

import signal
import sys

import fault_acts as acts
from fault import (
    ALL,
    TWO_IN_ONE,
    WINDOW,
    Fault,
    hooked,
    listening,
)
from fault_injections import (
    at,
    at_start,
    fails,
    handles,
    in_turn,
    kills,
    raises,
)
from fault_runs import Rows
from fault_training import CustomTraining

SECOND_LOOP_WINDOW = 1000
"""Number of the first window of a restarted loop."""
ENDS = (
    Fault(
        name="own error in a hooked step",
        rows=Rows(steps=(0, 1, 2)),
        status=(1,),
        act=hooked("forward", raises(ValueError("own"))),
    ),
    Fault(
        name="own error in a hooked step, forgiven",
        rows=TWO_IN_ONE,
        act=in_turn(
            at_start(acts.forgive(ValueError)), hooked("middle", raises(ValueError("own")))
        ),
    ),
    Fault(
        name="Ctrl-C in a hooked step",
        rows=Rows(steps=(0, 1, 2)),
        status=(-signal.SIGINT,),
        act=hooked("forward", kills(signal.SIGINT)),
    ),
    Fault(
        name="Ctrl-C inside a hook, forgiven",
        rows=Rows(steps=(0, 1, 2, 4, 5, 6), whole=(6,), windows=(0,)),
        act=in_turn(
            at_start(acts.forgive(KeyboardInterrupt)),
            hooked("forward", acts.interrupt_without_us),
        ),
        arrange=fails("forerun.hooks.sensors.recorder:Recorder.begin_span", KeyboardInterrupt()),
    ),
    Fault(
        name="sys.exit(3) in a hooked step",
        rows=Rows(steps=(0, 1, 2)),
        status=(3,),
        act=hooked("middle", acts.leave),
    ),
    Fault(
        name="os._exit(9) in the window",
        rows=Rows(steps=(0, 1, 2, 3, 4)),
        status=(9,),
        act=at(5, "forward", acts.vanish),
    ),
    Fault(
        name="SIGKILL in the window",
        rows=Rows(steps=(0, 1, 2, 3, 4)),
        status=(-signal.SIGKILL,),
        act=at(5, "forward", kills(signal.SIGKILL)),
    ),
    Fault(
        name="SIGKILL after the window",
        rows=ALL,
        status=(-signal.SIGKILL,),
        act=at(9, "end", kills(signal.SIGKILL)),
    ),
    Fault(
        name="SIGTERM in a hooked step",
        rows=Rows(steps=(0, 1, 2)),
        status=(-signal.SIGTERM,),
        act=hooked("forward", kills(signal.SIGTERM)),
    ),
    Fault(
        name="SIGTERM in a hooked step, the script exits with 143",
        rows=Rows(steps=(0, 1, 2)),
        status=(143,),
        act=in_turn(
            at_start(handles(signal.SIGTERM, lambda _: sys.exit(143))),
            hooked("forward", kills(signal.SIGTERM)),
        ),
    ),
    Fault(
        name="SIGUSR1 in a hooked step",
        rows=Rows(steps=(0, 1, 2)),
        status=(-signal.SIGUSR1,),
        act=hooked("forward", kills(signal.SIGUSR1)),
    ),
    Fault(
        name="SIGUSR1 in a hooked step, the script notes it",
        rows=ALL,
        act=in_turn(
            at_start(handles(signal.SIGUSR1, lambda training: training.log("signal"))),
            hooked("forward", kills(signal.SIGUSR1)),
        ),
    ),
    Fault(
        name="one rank of two dies in the window",
        rows=Rows(steps=(0, 1, 2, 3, 4, 5), whole=(3,), windows=(0,)),
        num_ranks=2,
        status=(1, 9),
        act=at(5, "middle", acts.vanish, rank=1),
    ),
    Fault(
        name="one rank of two is killed in a hooked step",
        rows=Rows(steps=(0, 1, 2)),
        num_ranks=2,
        status=(1, -signal.SIGKILL),
        act=hooked("forward", kills(signal.SIGKILL), rank=1),
    ),
    Fault(
        name="one rank of two fails after the window",
        rows=ALL,
        num_ranks=2,
        status=(1, 1),
        act=at(8, "middle", raises(ValueError("own")), rank=1),
    ),
)
SCRIPT = (
    Fault(
        name="a forked child exits in a hooked step", rows=ALL, act=hooked("end", acts.exit_forked)
    ),
    Fault(
        name="a forked child exits in a hooked pass, companion listening",
        rows=ALL,
        act=hooked("middle", acts.exit_forked),
        settings=listening(),
    ),
    Fault(
        name="a data loader forks workers in a hooked step",
        rows=ALL,
        act=hooked("middle", acts.load_data),
    ),
    Fault(
        name="the weights are saved in a hooked step",
        rows=ALL,
        act=hooked("middle", acts.save_weights),
    ),
    Fault(
        name="the user clears all hooks in a hooked step",
        rows=ALL,
        loop=CustomTraining,
        act=hooked("forward", acts.clear_hooks),
    ),
    Fault(
        name="evaluation inside a hooked step", rows=TWO_IN_ONE, act=hooked("middle", acts.evaluate)
    ),
    Fault(
        name="fewer micro-batches from a hooked step on",
        rows=Rows(steps=ALL.steps, whole=(3,), partial=(6,), windows=(0,)),
        act=hooked("begin", acts.fewer_microbatches),
    ),
    Fault(
        name="the optimizer is skipped in a hooked step",
        rows=TWO_IN_ONE,
        act=in_turn(hooked("middle", acts.skip_optimizer), hooked("end", acts.resume_updates)),
    ),
    Fault(
        name="forward passes outside any step",
        rows=ALL,
        act=in_turn(
            at(2, "end", acts.forward_outside),
            at(3, "end", acts.forward_outside),
            at(8, "end", acts.forward_outside),
        ),
    ),
    Fault(
        name="the model is moved between hooked steps",
        rows=ALL,
        loop=CustomTraining,
        act=at(4, "begin", acts.move),
    ),
    Fault(
        name="training begins again in the same process",
        rows=Rows(
            steps=tuple(range(7)) + tuple(range(8, 15)),
            whole=(3, 6, 11, 14),
            windows=(0, SECOND_LOOP_WINDOW),
        ),
        act=in_turn(
            at_start(acts.train_longer),
            at(8, "begin", acts.rebuild),
            at(8, "end", acts.log_alive),
        ),
    ),
    Fault(
        name="training begins again in the window",
        rows=Rows(steps=tuple(range(12)), whole=(3, 8, 11), windows=(SECOND_LOOP_WINDOW,)),
        act=in_turn(
            at_start(acts.train_longer),
            at(5, "begin", acts.rebuild),
            at(6, "end", acts.log_alive),
        ),
    ),
    Fault(
        name="a thread calls collectives all the time",
        rows=ALL,
        num_ranks=2,
        status=(0, 0),
        act=in_turn(
            at(1, "begin", acts.start_collective_thread, rank=-1),
            at(8, "end", acts.join_collective_thread, rank=-1),
        ),
    ),
    Fault(
        name="the user wraps a collective in a hooked step",
        rows=ALL,
        act=in_turn(hooked("begin", acts.wrap_collective), at(8, "end", acts.log_calls)),
    ),
    Fault(
        name="warnings are errors",
        rows=ALL,
        loop=CustomTraining,
        act=at(-1, "built", acts.warnings_are_errors),
    ),
    Fault(
        name="modules give back dicts, tuples, texts and None",
        rows=ALL,
        loop=CustomTraining,
        act=acts.built(acts.odd_outputs),
    ),
    Fault(
        name="an optimizer that is none of torch's",
        rows=Rows(steps=ALL.steps, partial=WINDOW, windows=(0,)),
        loop=CustomTraining,
        act=acts.built(acts.bare_optimizer),
    ),
    Fault(
        name="frozen modules",
        rows=Rows(steps=ALL.steps, partial=WINDOW, windows=(0,)),
        loop=CustomTraining,
        act=acts.built(acts.detached),
    ),
)
