"""The faults: how each is injected, how training must end, and which rows must be readable."""

from __future__ import annotations

import fault_acts as acts
from fault import (
    ALL,
    NO_OPERATORS,
    NOTHING,
    NOTHING_HOOKED,
    WINDOW,
    Fault,
    hooked,
    shell,
)
from fault_cases_script import ENDS, SCRIPT
from fault_injections import (
    ALWAYS,
    HOUR_NS,
    a_file_in_the_way,
    a_hanging_disk,
    at,
    at_start,
    begin_clock_jump,
    both,
    clock_jumps,
    device_reads,
    exhaust_file_descriptors,
    existing_file,
    fail_thread_start,
    fails,
    handler_raises,
    in_turn,
    limit_file_size,
    no_space,
    on_rank,
    raises,
    remove_directory,
    restore_file_limit,
    streams_closed,
    wait_for_writer,
    wall_clock_jumps,
    wandb_log_raises,
    wandb_raises,
)
from fault_runs import Rows
from fault_training import CustomTraining

CONTROLS = (
    Fault(name="nothing is wrong", rows=ALL, is_control=True),
    Fault(
        name="nothing is wrong, two ranks", rows=ALL, num_ranks=2, status=(0, 0), is_control=True
    ),
    Fault(
        name="nothing is wrong, a loop of one's own", rows=ALL, loop=CustomTraining, is_control=True
    ),
)
DISK = (
    Fault(name="a file where the directory should be", rows=NOTHING, arrange=a_file_in_the_way),
    Fault(name="no space from the first write on", rows=NOTHING, arrange=no_space),
    Fault(
        name="disk full in the middle of a line",
        rows=Rows(steps=ALL.steps),
        strike=at(4, "begin", limit_file_size(8192)),
    ),
    Fault(
        name="directory removed in the window",
        rows=NOTHING,
        strike=at(4, "begin", remove_directory),
    ),
    Fault(name="disk hangs", rows=NOTHING, arrange=a_hanging_disk),
    Fault(
        name="own file of an earlier run, cut off in its header",
        rows=ALL,
        arrange=existing_file(b'{"type": "header", "sche'),
    ),
    Fault(
        name="own file of an earlier run, damaged bytes",
        rows=ALL,
        arrange=existing_file(b"\x00\xff\xfe{]\n" * 40 + b'{"type": "st'),
    ),
    Fault(
        name="no file descriptor left",
        rows=NOTHING,
        act=in_turn(at(0, "begin", exhaust_file_descriptors), at(9, "end", restore_file_limit)),
    ),
    Fault(name="no thread can be started", rows=NOTHING, arrange=fail_thread_start),
    Fault(
        name="one rank of two cannot write",
        rows=NOTHING,
        num_ranks=2,
        status=(0, 0),
        arrange=on_rank(0, no_space),
    ),
)
COMPANION = (
    Fault(
        name="companion does not exist",
        rows=ALL,
        settings={"companion_command": ("/nowhere/companion",)},
    ),
    Fault(name="companion ends at once", rows=ALL, settings=shell("exit 3")),
    Fault(
        name="companion killed in the window",
        rows=ALL,
        settings=shell("read a; read b; read c; read d; kill -9 $$"),
    ),
    Fault(
        name="companion prints garbage",
        rows=ALL,
        settings=shell("head -c 4000 /dev/urandom; cat > /dev/null"),
    ),
    Fault(name="companion never reads and hangs 4 s", rows=ALL, settings=shell("exec sleep 4")),
    Fault(
        name="companion gone, SIGPIPE at its default",
        rows=ALL,
        settings=shell("exit 3"),
        act=at_start(acts.default_sigpipe),
    ),
    Fault(
        name="companion hangs, the script fails",
        rows=Rows(steps=ALL.steps, whole=WINDOW, windows=(0,)),
        status=(1,),
        settings=shell("exec sleep 20"),
        act=at(8, "forward", raises(ValueError("own"))),
    ),
)
WANDB = (
    Fault(name="W&B fails at every log", rows=ALL, arrange=wandb_log_raises),
    Fault(name="W&B fails at every attribute", rows=ALL, arrange=wandb_raises),
)
_SESSION = "forerun.hooks.session.session:Session"
_INSTRUMENTS = "forerun.hooks.session.instruments:Instruments"
_RECORDER = "forerun.hooks.sensors.recorder:Recorder"
HOOKS = (
    Fault(
        name="putting on fails every time",
        rows=NOTHING_HOOKED,
        arrange=fails(f"{_INSTRUMENTS}.put_on", RuntimeError("no"), ALWAYS),
    ),
    Fault(
        name="taking off fails once",
        rows=Rows(steps=ALL.steps, whole=WINDOW, faulted=(3,), windows=(0,)),
        arrange=fails(f"{_INSTRUMENTS}.take_off", RuntimeError("no")),
    ),
    Fault(
        name="removal of one kind of hook fails",
        rows=Rows(steps=ALL.steps, whole=WINDOW, faulted=WINDOW, windows=(0,)),
        arrange=fails("forerun.hooks.sensors.timers:TimerHooks.remove", RuntimeError("no"), (0, 2)),
    ),
    Fault(
        name="three faults in one step",
        rows=Rows(steps=(0, 1, 2)),
        arrange=fails(f"{_RECORDER}.begin_phase", ZeroDivisionError("mark"), ALWAYS),
    ),
    Fault(
        name="MemoryError in a mark",
        rows=Rows(steps=ALL.steps, whole=(6,), partial=(3,), faulted=(3,), windows=(0,)),
        arrange=fails(f"{_RECORDER}.begin_span", MemoryError()),
    ),
    Fault(
        name="RecursionError in a mark",
        rows=Rows(steps=ALL.steps, whole=(6,), partial=(3,), faulted=(3,), windows=(0,)),
        arrange=fails(f"{_RECORDER}.begin_span", RecursionError("deep")),
    ),
    Fault(
        name="a collective cannot be described",
        rows=Rows(steps=ALL.steps, whole=WINDOW, faulted=(3,), windows=(0,)),
        arrange=fails(f"{_RECORDER}.add_transfer", AttributeError("group_desc")),
    ),
    Fault(
        name="the run cannot be described",
        rows=Rows(steps=ALL.steps, partial=WINDOW, faulted=(0,), windows=(0,)),
        arrange=fails("forerun.hooks.adapters.megatron_core:run_config", KeyError("seq_length")),
    ),
    Fault(
        name="the place of the rank is unknown",
        rows=ALL,
        arrange=fails("forerun.hooks.adapters.megatron_core:place", AttributeError("rank")),
    ),
    Fault(
        name="a record cannot be encoded",
        rows=Rows(steps=(0, 1, 3, 4, 5, 6), whole=WINDOW, windows=(0,)),
        arrange=fails("forerun.hooks.recording.writer:line_of", TypeError("not JSON"), (4,)),
    ),
    Fault(
        name="marks of a step cannot be written",
        rows=Rows(steps=ALL.steps, whole=(6,), windows=(0,)),
        arrange=fails("forerun.calib.marks.marked_window:_of_step", IndexError("mark")),
    ),
    Fault(
        name="the exit handler fails",
        rows=ALL,
        arrange=fails(f"{_SESSION}._at_exit", RuntimeError("late")),
        act=at(9, "end", wait_for_writer),  # at its own pace: nothing waits for it at the exit
    ),
    Fault(
        name="a fault, and the user's log handler fails on it",
        rows=Rows(steps=ALL.steps, whole=(6,), faulted=(3,), windows=(0,)),
        arrange=both(fails(f"{_INSTRUMENTS}.put_on", RuntimeError("no")), handler_raises),
    ),
    Fault(
        name="a fault while stdout and stderr are closed",
        rows=Rows(steps=ALL.steps, whole=(6,), faulted=(3,), windows=(0,)),
        arrange=fails(f"{_INSTRUMENTS}.put_on", RuntimeError("no")),
        act=at_start(streams_closed),
    ),
    Fault(
        name="a fault on one rank of two",
        rows=Rows(steps=ALL.steps, whole=(6,), faulted=(3,), windows=(0,)),
        num_ranks=2,
        status=(0, 0),
        arrange=on_rank(0, fails(f"{_INSTRUMENTS}.put_on", RuntimeError("no"))),
    ),
)
CLOCKS = (
    Fault(
        name="clock one hour ahead in a hooked step",
        rows=ALL,
        arrange=clock_jumps(HOUR_NS),
        strike=hooked("forward", begin_clock_jump),
    ),
    Fault(
        name="clock one hour back in a hooked step",
        rows=Rows(steps=ALL.steps, whole=WINDOW, faulted=(3,), windows=(0,)),
        arrange=clock_jumps(-HOUR_NS),
        strike=hooked("forward", begin_clock_jump),
    ),
    Fault(name="time of day one hour back", rows=ALL, arrange=wall_clock_jumps),
    Fault(name="device times are NaN", rows=NO_OPERATORS, arrange=device_reads(float("nan"))),
    Fault(name="device times are infinite", rows=NO_OPERATORS, arrange=device_reads(float("inf"))),
    Fault(name="device times are negative", rows=NO_OPERATORS, arrange=device_reads(-5.0)),
    Fault(
        name="the device never gets there",
        rows=NO_OPERATORS,
        arrange=device_reads(1.0, is_reached=False),
    ),
    Fault(
        name="no more events", rows=Rows(steps=(0, 1, 2)), arrange=device_reads(1.0, num_events=10)
    ),
)
FAULTS = (*CONTROLS, *DISK, *COMPANION, *WANDB, *HOOKS, *CLOCKS, *ENDS, *SCRIPT)
