"""``RunConfig`` from a Megatron args namespace, with its unmodelled settings listed.

Defaults and rules are those of Megatron-LM core_v0.16.1 (``validate_args`` of
``megatron/training/arguments.py`` and ``TransformerConfig.__post_init__``), so that arguments give
the same config before and after validation.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..memory.activations import OFFLOADED_MODULES
from ..workload.argument_fields import read_fields
from ..workload.argument_values import Arguments, whole
from ..workload.config import Attention, Batch, Cadence, CheckpointForm, Precision, RunConfig
from ..workload.parallelism import Parallelism
from ..workload.pipeline_layout import PipelineLayout
from ._hybrid_pattern import HybridPattern, segments_of, with_pattern
from ._megatron_model import model_shape
from ._megatron_settings import (
    SETTINGS,
    chunks,
    fsdp_dtypes,
    is_in_8_bits,
    pipeline_layout,
)
from ._torch_stacks import on_stack
from .megatron_options import unmodelled_settings

_OF_CADENCE = ("full_batch_size", "num_final_evals", "exit_interval")
"""Fields of ``Cadence`` that only a namespace says."""


def from_namespace(args: object) -> RunConfig:
    """Return the config of a run from Megatron's arguments: a mapping, or any object with their
    names.

    Arguments may be as given or as ``validate_args`` leaves them; ``world_size`` and
    ``ranks_per_node`` are the launcher's.  Settings that are not modelled (hybrid models, ...) are
    listed by name in ``unmodelled``.  Raise ``ConfigError`` if a size without a default is missing
    or the layout cannot run.
    """
    given, pattern = with_pattern(Arguments(args))
    layout = pipeline_layout(given)
    parallelism = _parallelism(given, layout, pattern)
    model = model_shape(given, parallelism.tp, pattern)
    if layout is not None and sum(layout.chunk_layers) != model.num_layers:
        raise ConfigError(
            f"the pipeline layout has {sum(layout.chunk_layers)} t, not num_layers "
            f"{model.num_layers}; make them agree"
        )
    micro = given.required("micro_batch_size")
    batch = Batch(
        micro_batch_size=micro,
        global_batch_size=_full_batch(given, micro * parallelism.dp),
    )
    config = RunConfig(
        model=model,
        parallelism=parallelism,
        batch=batch,
        cadence=_cadence(given, batch),
        unmodelled=_unmodelled(given, layout),
        **_of_run(given),
    )
    return on_stack(config, given.text("framework"))


def _of_run(given: Arguments) -> dict[str, Any]:
    """Return the fields of ``RunConfig`` alone."""
    # Megatron's default is Transformer Engine; core's own layers have a seq x seq matrix.
    is_local = given.text("transformer_impl") == "local"
    fields = read_fields(RunConfig, given)
    fields |= {
        "precision": _precision(given),
        "fuses_norms": not is_local,
        "is_compiled": given.is_on("torch_compile"),
    }
    if is_local:
        fields["attention"] = Attention.UNFUSED
    if given.number("pipeline_model_parallel_size", default=1) == 1:
        fields["defers_head_gradients"], fields["head_deferral_limit"] = False, 0
    for setting in SETTINGS:
        fields |= setting.read(given, fields) if setting.part is RunConfig else {}
    return fields


def _parallelism(
    given: Arguments, layout: PipelineLayout | None, pattern: HybridPattern | None
) -> Parallelism:
    fields = read_fields(Parallelism, given)
    tp, pp, cp, etp = (fields[name] for name in ("tp", "pp", "cp", "etp"))
    segments = segments_of(pattern, pp)
    vp, layers = (len(segments) // pp, segments) if segments else chunks(given, layout, pp)
    has_chunks = vp > 1
    group = fields["microbatch_group_size"]
    fields |= {
        "vp": vp,
        "dp": _replicas(given, {"tp": tp, "pp": pp, "cp": cp}),
        "etp": 0 if etp == tp else etp,
        "chunk_layers": () if len(set(layers)) == 1 else layers,
        "microbatch_group_size": 0 if vp == 1 or group == pp else group,
        "is_sequence_parallel": fields["is_sequence_parallel"] and tp > 1,
        "overlaps_p2p": fields["overlaps_p2p"] or vp == 1,
        "overlaps_p2p_ends": fields["overlaps_p2p_ends"] and has_chunks,
        "gathers_beside_update": fields["gathers_beside_update"]
        and has_chunks
        and fields["overlaps_param_gather"],
        "ranks_per_node": given.number("ranks_per_node"),
    }
    for setting in SETTINGS:
        fields |= setting.read(given, fields) if setting.part is Parallelism else {}
    return Parallelism(**fields)


def _replicas(given: Arguments, degrees: dict[str, int]) -> int:
    """Return dp: from the number of ranks if known, else as given, else 1."""
    shown = {name: degree for name, degree in degrees.items() if degree != 1 or name != "cp"}
    layout = " x ".join(f"{name} {degree}" for name, degree in shown.items())
    size = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if min(degrees.values()) < 1:
        raise ConfigError(f"{layout} is not a layout; give degrees of at least 1")
    world, dp = given.number("world_size"), given.number("data_parallel_size")
    if not world:
        return dp or 1
    if dp and dp * size != world:
        raise ConfigError(
            f"--gpus {world} is not {layout} x dp {dp}; leave one of them out or make them agree"
        )
    dp, rest = divmod(world, size)
    if rest or not dp:
        nearest = max(1, round(world / size)) * size
        remedy = f"give degrees whose product divides {world}"
        if not (heads := given.number("num_attention_heads")) or heads % degrees["tp"] == 0:
            remedy = f"give --gpus {nearest}, or {remedy.removeprefix('give ')}"
        raise ConfigError(f"{world} ranks do not split over {layout}; {remedy}")
    return dp


def _precision(given: Arguments) -> Precision:
    if given.is_on("bf16"):
        return Precision.BF16
    return Precision.FP16 if given.is_on("fp16") else Precision.FP32


def _full_batch(given: Arguments, micro_batches: int) -> int:
    """Return the global batch; the last size of a schedule, which excludes ``--global-batch-size``,
    if there is one."""
    schedule = " ".join(given.words("step_batch_size_schedule")).replace(",", " ").split()
    if schedule:
        return whole("step_batch_size_schedule", schedule[-1].rpartition(":")[2])
    return given.number("global_batch_size") or micro_batches


def _cadence(given: Arguments, batch: Batch) -> Cadence:
    ramp = given.words("rampup_batch_size")
    if ramp and len(ramp) != 3:
        raise ConfigError(
            f"--rampup-batch-size {' '.join(ramp)} is not START INCREMENT SAMPLES; give three "
            "whole numbers"
        )
    rampup = tuple(whole("rampup_batch_size", word) for word in ramp)
    fields = read_fields(Cadence, given) | {name: given.number(name) for name in _OF_CADENCE}
    samples = given.number("train_samples")
    if samples and not fields["train_iters"]:
        full = fields["full_batch_size"] or batch.global_batch_size
        fields["train_iters"] = _num_steps(samples, full, rampup)
    return Cadence(
        rampup_batch_size=rampup,
        step_batch_size_schedule=" ".join(given.words("step_batch_size_schedule")),
        is_saving=bool(given.text("save")),
        checkpoint_form=_checkpoint_form(given),
        **fields,
    )


def _checkpoint_form(given: Arguments) -> CheckpointForm:
    """Return how the state is saved (``training/checkpointing.py`` of core 0.16.1).

    Before core 0.14 the buffers of the distributed optimizer were split by weight in a save that
    all replicas share.
    """
    form, option = given.text("ckpt_format"), "dist_ckpt_optim_fully_reshardable"
    if not form:
        return CheckpointForm.UNKNOWN
    if not any(given.text(name) for name in ("save", "load", "pretrained_checkpoint")):
        return CheckpointForm.NONE
    if given.is_on("no_save_optim"):
        return CheckpointForm.WEIGHTS
    if form == CheckpointForm.BY_RANK.value:
        return CheckpointForm.BY_RANK
    if form not in ("torch_dist", "zarr"):
        return CheckpointForm.BY_SHARD
    is_before = given.get(option) is None or given.is_on("dist_ckpt_save_pre_mcore_014")
    is_by_weight = given.is_on(option) or (is_before and given.is_on("ckpt_fully_parallel_save"))
    if given.is_on("use_distributed_optimizer") and not is_by_weight:
        return CheckpointForm.BY_BUFFER
    return CheckpointForm.BY_WEIGHT


def _num_steps(samples: int, global_batch_size: int, rampup: tuple[int, ...]) -> int:
    """Return the steps of a run given in samples (``update_train_iters`` of core 0.16.1)."""
    if not rampup or rampup[1] < 1 or rampup[0] >= global_batch_size:
        return samples // global_batch_size
    start, increment, until = rampup
    samples_each = until / ((global_batch_size - start) // increment)
    done = steps = 0
    while done <= min(until, samples):
        done += min(start + int(done / samples_each) * increment, global_batch_size)
        steps += 1
    return steps + max(samples - done, 0) // global_batch_size


def _unmodelled(given: Arguments, layout: PipelineLayout | None) -> tuple[str, ...]:
    unmodelled_names = list(unmodelled_settings(given))
    if len(set(given.words("cp_comm_type"))) > 1:
        unmodelled_names.append("cp_comm_type")
    if len(set(fsdp_dtypes(given))) > 1:
        unmodelled_names.append("megatron_fsdp_grad_comm_dtype")
    if is_in_8_bits(given) and given.text("fp8_recipe") == "custom":
        unmodelled_names.append("fp8_recipe")
    modules = {word for text in given.words("offload_modules") for word in text.split()}
    if given.is_on("fine_grained_activation_offloading") and modules - OFFLOADED_MODULES:
        unmodelled_names.append("offload_modules")
    if layout is not None and not layout.is_plain:
        unmodelled_names.append("pipeline_model_parallel_layout")
    return tuple(unmodelled_names)
