"""Text of the reference that no declaration contains; tests check each name against the code."""

# ruff: noqa: E501  The lines are sentences of the pages.

from __future__ import annotations

SAYS = {
    "flags": """Words behind the script of a launch, or in front of it. An impossible value costs one
line in the log; training goes on without calibration.

`--calibrate` switches it on, and so does each flag below. Every flag has a second name that no other
program has: `--forerun`, `--forerun-steps=8`. Always write the `=`.""",
    "flags_end": """`FORERUN_CALIBRATE=1` is `--calibrate` for launches whose arguments are templated;
`FORERUN_OFF=1` switches all of it off ([environment variables](environment.md)). A `--calibrate...`
that your program has as an option of its own, or may have, is left to it, and one line says so.""",
    "verbs": """`forerun VERB --help` prints the same. All verbs but `probe` need the directory, not
torch; `status`, `doctor` and `run` need the standard library alone. Codes with which they end:
[exit codes](exit_codes.md). What `--json` prints: [answers](answers.md).""",
    "files": """Each launch has a folder of its own, `DIR/runs/<name>/`; its files lie there, and
`DIR/latest` is a link to the newest of these folders. All are replaced whole, never written in part. Each JSON
file carries its `schema`: new keys may come; none goes, or changes its meaning, while the number stays.
`forerun report --json-schema decision` prints the JSON Schema of `decision.json`, and so on.

`a.b` is key `b` of the object `a`; `a[].b` of each of its items; `a.NAME.b` of each of its values. A key
ends in its unit: `_s` seconds, `_nbytes` bytes, `_frac` a share (0.1 is 10 %). Intervals are of 90 %.""",
    "answers": """`--json` of a verb prints one JSON value; `--json-schema` prints its schema. `report`
prints what [`decision.json`, `forecast.json` and the others](files.md) hold. Keys are read as there.""",
    "values": """What a step has of these goes to [every place that is switched on](../values.md). W&B and
TensorBoard write `calib/` before each name. A name ends in its unit: `_s` seconds, `_unix_s` seconds since
1970, `_h` hours, `_frac` a share of 1, `_per_s` of a second; Prometheus has base units of its own.""",
    "summary": """The summary of a W&B run has these as well, and the rates of the measured step. Those of
the next window need three windows, those of the end two.""",
    "exit_codes": "Of all verbs but `run`. What went wrong is one line on standard error.",
    "run_exit_codes": """torchrun turns every exit code of a worker into 1. `forerun run -- COMMAND` stands
in front of it and ends with a code that a scheduler can act on.""",
    "environment": "Variables of Forerun.",
    "foreign": "Read where they are, never set, but for those of a child process.",
    "python": """`import forerun` loads neither torch nor numpy; each name is loaded on first use. How
they are used: [a calibrated run in Python](../python.md), and
[a loop of your own](../guides/own_loop.md).""",
}

EXIT_CODES = {
    0: "an answer",
    1: "an answer, and a threshold is crossed: the advice is to stop, or `--fail-over`",
    2: "usage: a word that is not known, an impossible value or layout",
    3: "not enough data, a record that cannot be read, or runs that cannot be compared",
}
WRAPPER_EXIT_CODES = {
    0: "finished; or saved and stopped since the scheduler asked or its limit is near: a chained job "
    "goes on",
    93: "stopped on advice: do not requeue. `resubmit.sh` starts the advised layout; read it, then run "
    "it yourself (`--stop-exit-code` changes 93)",
    2: "no command was given, or an option cannot be",
    126: "the command cannot be started",
    127: "the command is not there",
    "128 + n": "ended by signal n",
    "other": "the command's own",
}

_YOU, _RUN, _SELF = "you", "`forerun run`", "Forerun, in a worker"
VARIABLES = {
    "FORERUN_CALIBRATE": (_YOU, "`1`: as `--calibrate`"),
    "FORERUN_OFF": (_YOU, "`1`: all of it is off, whatever the arguments say"),
    "FORERUN_DEVICE": (
        _YOU,
        "`cpu`: as `--calibrate-device=cpu`; alone, without a flag, training runs on the stand-in and "
        "nothing is calibrated",
    ),
    "FORERUN_PYTHON": (
        _YOU,
        "the Python whose environment has the extra `analysis`: as `--calibrate-python`",
    ),
    "FORERUN_LAUNCH_ID": (
        f"{_RUN}, or you",
        "the name of the launch; its folder below `DIR/runs/`",
    ),
    "FORERUN_LIMIT_UNIX_S": (_RUN, "when the scheduler ends the job"),
    "FORERUN_REQUESTS": (_RUN, "`1`: it may ask training to save and stop"),
    "FORERUN_OWNER": (_SELF, "process that has the session, so that its children have none"),
    "FORERUN_TAKEN": (_SELF, "flags that were taken, so that its children find them taken"),
    "FORERUN_STAND_IN_PID": (_SELF, "process that put the CPU stand-in on"),
}
FOREIGN_VARIABLES = {
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE": "which rank this is; set by "
    "torchrun, until `torch.distributed` says it in training",
    "MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT": "the launch's name, "
    "and restarts",
    "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE, PMI_RANK, PMI_SIZE, PMIX_NAMESPACE, MPI_LOCALRANKID, MPI_LOCALNRANKS": "the "
    "same under MPI",
    "SLURM_*, SLURMD_NODENAME": "the job, its limits, how it was submitted, and the rank under `srun`",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "`0`: `import torch` calls nobody; start with "
    "`-m forerun.launch` then",
    "PYTHONPATH": "by `doctor`: what stands in the way of the package",
    "TEARDOWN_CUPTI, DISABLE_CUPTI_LAZY_REINIT, NSYS_PROFILING_SESSION_ID, CUDA_INJECTION64_PATH, NVTX_INJECTION64_PATH": "whether another profiler is there; the first is put to `1` for the end of the profiled step, and both are put back",
    "NCCL_*": "what joins the GPUs, and what NCCL may choose from ([cluster](../cluster.md))",
    "CUDA_VISIBLE_DEVICES": "whose energy is read",
    "WANDB_MODE, WANDB_DISABLED, WANDB_PROJECT, WANDB_API_KEY, WANDB_BASE_URL, NETRC": "whether and "
    "where a W&B run of our own goes; of a key only that it is there",
    "KUBEFLOW_TRAINER_SERVER_*, DISABLE_KUBEFLOW_INTEGRATION": "the TrainJob that this is",
    "NO_COLOR": "tables without colours",
}

OUTPUT_FILES = {
    "report.html": "everything: charts, tables and text; the page needs no network",
    "decision.json": "keep running, stop or none yet; the reasons with their numbers; the new command line, "
    "or why there is none",
    "forecast.json": "step time, P50 and P95 of the finish, what they are made of; GPU-hours, cost and "
    "energy where known",
    "answer.json": "all that is said of the run as of its newest window: `forecast`, `decision`, and "
    "of a run whose layout is known `plan` (layouts ranked, each with interval, memory and "
    "provenance), `waiting` (transfer and waiting by group, clocks, the slowest rank) and "
    "`calibration` (what was fitted, and how the error moved from window to window)",
    "drift.json": "changes of the step's level: since when, by how much, and what changed",
    "score.json": "after the run: predicted against actual",
    "stop.json": "only after a stop: after which iteration, why, and the command line to go on with",
    "status.json": "what the run says now, for `status`; renewed while it is live",
    "timeline.json.gz": "predicted and measured step, for Perfetto or `chrome://tracing`",
    "samples.parquet": "the samples of the newest windows, and of older ones what nothing newer has",
    "steps.parquet": "each step's time and what was said of it before: `run.steps` in Python",
    "request.json": "what was asked of the analysis, and what the run had shown",
    "fit-*.npz": "cache of what was fitted for `predict` and `plan`, read back by the same user until "
    "anything under it changes; may be deleted",
    "report-*.json": "the same of what `report` printed",
    "forecasts.jsonl": "DIR alone: every forecast that was made and how each run ended, for `report`",
    "latest": "DIR alone: link to the folder of the launch whose first answer is the newest",
    "runs/*": "DIR alone: a folder for each launch; in it `launch.json`, `host_values.json` and "
    "`host_tables.jsonl` where W&B has a run of training's own, and `stop-request.json` while a "
    "wrapper asks for a stop",
    "records/*": "DIR alone: what the hooks wrote, one file per rank, and `command.json`, how the run "
    "was launched",
    "tensorboard/*": "event files, where training writes none of its own",
    "wandb/*": "the offline run, where training has none of its own",
    "resubmit.sh": "written by `forerun run` after an advised stop",
}

OF_ANSWERS = {
    "predict: one layout": ("answers.schema.json", "prediction"),
    "plan: for one device and one number of GPUs": ("answers.schema.json", "plan_answer"),
    "plan of several: a plan for each device and number of GPUs": (
        "answers.schema.json",
        "plans_answer",
    ),
    "explain: terms of one layout, or of two": ("explain.schema.json", ""),
    "normal: a run among published ones": ("normal.schema.json", ""),
    "diff: two runs or windows held against each other": ("diff.schema.json", ""),
    "status: a launch each; also each line of --watch": ("status.schema.json", ""),
    "doctor of a launch: what it wastes, distorts or risks": ("lint.schema.json", ""),
}
