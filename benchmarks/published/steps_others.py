"""Step tables of other stacks: Sailor, nanotron, llm-foundry, NeuSight."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from forerun.benchmarks.published.step_records import (
    Record,
    Stack,
    family,
    gpt_shape,
    layout,
    llama_like,
    padded_vocab,
    step_row,
    with_torch_states,
)
from forerun.calib.errors import ConfigError
from forerun.calib.records.step_rows import StepKind, StepRow, Trait
from forerun.calib.workload.config import Attention, Recompute
from forerun.calib.workload.model_shape import ModelShape

_MS = 1e-3


def read_sailor(record: Record) -> StepRow:
    """Read Sailor's runs of Megatron-DeepSpeed: fp32, no recompute, explicit layers per stage.

    ``layers_per_stage`` counts embedding and head as a layer each.  Runs on several kinds of device
    are skipped.
    """
    device = record.text("gpus_types", "gpu")
    if re.search(r"[|,+; ]", device):
        raise ConfigError(f"gpus_types {device!r} are several; one kind of device is modelled")
    cluster = record.text("cluster")
    per_node = re.search(r"\((\d+)\s*x", cluster)
    stack = Stack(
        framework="Megatron-DeepSpeed",
        attention=Attention.UNFUSED,
        ranks_per_node=int(per_node.group(1)) if per_node else 8,
    )
    tp = record.whole("tp")
    model = gpt_shape(record, vocab=padded_vocab(record.whole("vocab"), tp))
    stages = _stages(record, model)
    par = replace(layout(record, model, stack), chunk_layers=stages)
    return step_row(
        record,
        model=model,
        stack=stack,
        device=device,
        parallelism=par,
        precision=record.text("precision"),
        machine=f"{device} {cluster} {record.text('precision')}".strip(),
        label=record.text("model"),
        measured_s=record.number("step_time_s"),
        memory_nbytes=record.number("max_mem_bytes", default=0) or None,
    )


def _stages(record: Record, model: ModelShape) -> tuple[int, ...]:
    """Return transformer layers of each stage; empty if there is one stage or none are stated.

    >>> cells = {"layers_per_stage": "5|7|7|7", "pp": 4, "hidden": 8, "heads": 1, "layers": 24}
    >>> _stages(Record(cells), gpt_shape(Record(cells | {"seq_len": 8}), vocab=8))
    (4, 7, 7, 6)
    """
    if record.whole("pp") == 1 or not record.text("layers_per_stage"):
        return ()
    sizes = [int(text) for text in record.text("layers_per_stage").split("|")]
    if sum(sizes) == model.num_layers + 2:
        sizes[0] -= 1
        sizes[-1] -= 1
    return tuple(sizes)


def read_nanotron(record: Record) -> StepRow:
    """Read nanotron's bench of a 1B Llama, as huggingface/bench_cluster configured it in July 2024:
    24 layers of 2048, 32 heads, ffn 4096, GPT-2's vocabulary padded only to a multiple of tp, tied,
    stages of equal cost, 1F1B, ZeRO 1."""
    if "llama-1b" not in record.text("model").lower():
        raise ConfigError(f"model {record.text('model')!r} is not known; known is llama-1B")
    cells = {"layers": 24, "hidden": 2048, "heads": 32, "ffn": 4096}
    vocab = padded_vocab(_GPT2_VOCAB, record.whole("tp"), multiple=1)
    shape = gpt_shape(Record(cells), vocab=vocab, seq_length=record.whole("seq_len"))
    model = replace(llama_like(shape), is_tied=True)
    stack = Stack(framework="nanotron", is_sequence_parallel=True, is_optimizer_distributed=True)
    return step_row(
        record,
        model=model,
        stack=stack,
        parallelism=replace(
            layout(record, model, stack), chunk_layers=_equal_cost(model, record.whole("pp"))
        ),
        device="H100",
        machine="H100 nanotron bf16",
        label="llama-1B",
        measured_s=_MS * record.number("step_time_ms_median_it8_12"),
    )


_GPT2_VOCAB = 50257


def _equal_cost(model: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Return layers of each stage as nanotron assigns its blocks: in order, by the parameters of
    their products, a stage ending with the block that exceeds its share of the sum.

    >>> _equal_cost(llama_like(gpt_shape(Record(
    ...     {"layers": 24, "hidden": 2048, "heads": 32, "ffn": 4096}
    ... ), vocab=50257, seq_length=4096)), 8)
    (4, 3, 3, 4, 3, 3, 4, 0)
    """
    if num_stages == 1:
        return ()
    layer = 4 * model.hidden_size**2 + 3 * model.ffn_hidden_size * model.hidden_size
    head = model.vocab_size * model.hidden_size
    costs = np.cumsum([layer] * model.num_layers + [head])
    sizes = [0] * num_stages
    stage = 0
    for cost in costs[:-1]:
        sizes[stage] += 1
        stage += int(cost > costs[-1] * (stage + 1) / num_stages)
    return tuple(sizes)


def read_llmfoundry(record: Record) -> StepRow:
    """Read llm-foundry's MPT runs under FSDP, by blocks; each micro-batch reduces its gradients.

    Composer's mixed precision is PURE, with all transfers in 16 bits, or DEFAULT, with gradients in
    fp32; it prefetches late for the backward pass (``FSDPConfig``: ``BACKWARD_POST``), and none of
    the benchmarks' files changes that.  Its loss is flash-attn's, which keeps 16-bit logits
    (``loss_fn`` of ``modeling_mpt.py``: ``fused_crossentropy``).  Its rows on A100 are older than
    FlashAttention-2.
    """
    if (sharding := record.text("sharding")) not in _FSDP:
        raise ConfigError(f"sharding {sharding!r} is not known; known are {', '.join(_FSDP)}")
    if record.is_true("act_cpu_offload"):
        raise ConfigError("activations are offloaded, which is not modelled; leave the row out")
    shape = gpt_shape(record, vocab=record.whole("vocab_size"))
    device = record.text("gpu")
    is_full = record.is_true("recompute_full")
    stack = Stack(
        framework="llm-foundry",
        reduces_grads_in_bf16=record.text("mp_mode") == "PURE",
    )
    row = step_row(
        record,
        model=shape,
        stack=stack,
        parallelism=replace(layout(record, shape, stack), prefetches_backward=False),
        device=device,
        machine=f"{device} llm-foundry, {_NETWORK}",
        label=record.text("model") + (" recomputed" if is_full else ""),
        precision=record.text("precision"),
        recompute=Recompute.FULL if is_full else Recompute.NONE,
        is_loss_fused=True,
        measured_s=record.number("step_time_s_derived"),
        kind=StepKind.DERIVED,
    )
    traits = {Trait.LATE_GATHERS} | ({Trait.FIRST_FLASH} if "a100" in device.lower() else set())
    return replace(with_torch_states(row), traits=frozenset(traits))


_FSDP = ("FULL_SHARD", "SHARD_GRAD_OP")
_NETWORK = "1600 Gbit/s RoCE"


FAMILIES = (
    family(
        *("Sailor", "cluster gpus_types layers_per_stage step_time_s", read_sailor),
        id_column="source_file",
    ),
    family("nanotron", "grad_accum seq_len step_time_ms_median_it8_12", read_nanotron),
    family("llm-foundry", "d_model n_layers sharding step_time_s_derived", read_llmfoundry),
)
