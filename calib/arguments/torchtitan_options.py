"""torchtitan's options as ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ConfigError
from ..workload.argument_values import shown, whole
from ..workload.config import TORCHTITAN
from ..workload.pipeline_layout import write_layout
from .option_words import options_of

_NAMES: Mapping[str, str] = {
    "tensor_parallel_degree": "--tensor-model-parallel-size",
    "pipeline_parallel_degree": "--pipeline-model-parallel-size",
    "context_parallel_degree": "--context-parallel-size",
    "expert_parallel_degree": "--expert-model-parallel-size",
    "expert_tensor_parallel_degree": "--expert-tensor-parallel-size",
    "data_parallel_replicate_degree": "--num-distributed-optimizer-instances",
    "seq_len": "--seq-length",
    "steps": "--train-iters",
}
"""Our options by the last part of torchtitan's (``ParallelismConfig`` and ``TrainingConfig``)."""
_SCHEDULES = {"": 1, "1f1b": 1, "gpipe": 1, "interleaved1f1b": 2}
"""Chunks of a stage by the name of the schedule (``pipeline_llm``: two if it is of several)."""
_ASIDE = frozenset(
    ("activation_checkpoint", "checkpoint", "comm", "dataloader", "debug", "job", "lr_scheduler")
) | frozenset(("metrics", "optimizer", "profiler", "profiling", "validator"))
_SPELLED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("model.converters", "float8"): ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    ("float8.enable_fsdp_float8_all_gather", ""): ("--fp8-param-gather",),
    ("compile.enable", ""): ("--torch-compile",),
    ("training.compile", ""): ("--torch-compile",),
}
_HARMLESS = frozenset(
    ("model.name", "model.flavor", "model.hf_assets_path", "compile.components")
) | frozenset(
    f"float8.{name}"
    for name in ("precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd")
)


def titan_options(argv: Sequence[str], num_ranks: int, num_layers: int) -> tuple[str, ...]:
    """Return torchtitan's options on so many ranks, for a model of so many layers, as ours.

    A pipeline cuts each rank's batch into micro-batches of
    ``--parallelism.pipeline_parallel_microbatch_size``, 1 by default (``build_pipeline_schedule``).
    What decides time and is not read stays as it is.

    >>> titan_options(["--training.local_batch_size=32", "--parallelism.pipeline_parallel_degree",
    ...     "4"], 8, 32)[-6:]
    ('--micro-batch-size', '1', '--global-batch-size', '64', '--framework', 'torchtitan')
    """
    given, rest = _read(argv)
    number = {name: whole(name, word) for name, word in given.items() if word.lstrip("-").isdigit()}
    tp, pp, cp = (
        number.get(f"{kind}_parallel_degree", 1) for kind in ("tensor", "pipeline", "context")
    )
    local = number.get("local_batch_size") or number.get("batch_size") or 1
    micro = number.get("pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    total = max(number.get("global_batch_size", 0), 0) or local * num_ranks // (tp * pp * cp)
    options = [
        *(
            word
            for name, option in _NAMES.items()
            if name in given
            for word in (option, given[name])
        ),
        *rest,
        *("--bf16", "--no-use-megatron-fsdp", "--use-distributed-optimizer"),
        *(("--use-torch-fsdp2",) if number.get("data_parallel_shard_degree", -1) != 1 else ()),
        *(("--sequence-parallel",) if tp > 1 else ()),
        *(_pipeline(given, number, num_layers) if pp > 1 else ()),
        *_recompute(given.get("mode", "selective")),
        *("--gpus", str(num_ranks), "--micro-batch-size", str(micro)),
        *("--global-batch-size", str(total), "--framework", TORCHTITAN),
    ]
    return tuple(options)


def _read(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of options by their last part, and the words that decide time unread."""
    given: dict[str, str] = {}
    rest: list[str] = []
    for option, words in options_of(argv):
        path = option.removeprefix("--").replace("-", "_")
        section, _, name = path.rpartition(".")
        spelled = _SPELLED.get((path, words[0] if words else ""))
        if spelled is not None:
            rest += spelled
        elif words and (section in ("training", "parallelism") or name == "mode"):
            given[name] = words[0]
        elif section and section not in _ASIDE and path not in _HARMLESS:
            rest += [option, *words]
    return given, rest


def _pipeline(
    given: Mapping[str, str], number: Mapping[str, int], num_layers: int
) -> tuple[str, ...]:
    """Return the layers of each chunk: embedding and head count as one each, and what is left over
    goes to the first chunks (``generate_llm_fqn_per_model_part``)."""
    pp, name = number["pipeline_parallel_degree"], given.get("pipeline_parallel_schedule", "")
    if name.lower() not in _SCHEDULES:
        raise ConfigError(
            f"--parallelism.pipeline_parallel_schedule {shown(name)} is not modelled; give 1F1B or "
            "Interleaved1F1B"
        )
    each = number.get("pipeline_parallel_layers_per_stage", 0)
    num_chunks = -(-(num_layers + 2) // each) if each else pp * _SCHEDULES[name.lower()]
    layers, rest = divmod(num_layers + 2, num_chunks)
    chunks = [layers + (place < rest) for place in range(num_chunks)]
    chunks[0] -= 1
    chunks[-1] -= 1
    return ("--pipeline-model-parallel-layout", write_layout(tuple(chunks), 0))


def _recompute(mode: str) -> tuple[str, ...]:
    """Return the options of ``--activation_checkpoint.mode``: of selected operators, every second
    product is computed again, and the nearest in time is the MLP."""
    if mode == "full":
        whole_layers = ("--recompute-method", "uniform", "--recompute-num-layers", "1")
        return ("--recompute-granularity", "full", *whole_layers)
    if mode == "selective":
        return ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    return ()
