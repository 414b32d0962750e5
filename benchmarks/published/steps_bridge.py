"""Step tables of Megatron-Bridge: its performance summary, and the cards of its repository.

The summary names a model and its degrees.  What else a run switches on is in the recipe that it was
run with, which the release holds: ``bridge_recipes.csv`` has these, from
``scripts/performance/configs`` of NVIDIA-NeMo/Megatron-Bridge (Apache-2.0) at v0.2.0 (25.11),
v0.3.0 (26.02), v0.3.1 (26.02.01), v0.4.0 and v0.4.1 (26.04) and v0.5.0 (26.06); where several
recipes of one release have the degrees of a row and differ, there is none.  Where none has the
degrees of a row, it has the switches of software that all recipes of its release, model, device
and precision share.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from forerun.benchmarks.published.model_shapes import model_key, public_shape
from forerun.benchmarks.published.step_records import (
    Record,
    Stack,
    family,
    joined_flags,
    layout,
    step_row,
)
from forerun.calib.errors import ConfigError
from forerun.calib.records import StepKind, StepRow
from forerun.calib.workload import (
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    PositionEmbedding,
    Recompute,
    RunConfig,
    parse_layout,
)

_RECIPES = Path(__file__).with_name("bridge_recipes.csv")
_NVL72_RANKS = 64
"""GPUs of a rack that runs use as one NVLink domain."""
_KEYS = ("release", "model", "device", "precision")
_DEGREES = ("gpus", "tp", "pp", "cp", "vp", "ep", "micro_batch")
Recipe = Mapping[str, str]


def recipe_stack(framework: str, device: str) -> Stack:
    """What all of NVIDIA's recipes switch on: gradients as they are, weights as products read them
    (``grad_reduce_in_fp32=False``, ``fp8_param_gather=True`` in the recipes of performance), and
    products of dense layers beside their transfers (``tp_comm_overlap`` with a ``userbuffers_*``
    preset for each of these models: Llama 3 70B and 405B, GPT-3, Nemotron)."""
    return Stack(
        framework=framework,
        reduces_grads_in_bf16=True,
        keeps_fp8_params=True,
        is_sequence_parallel=True,
        is_optimizer_distributed=True,
        overlaps=True,
        overlaps_tp=True,
        ranks_per_node=_NVL72_RANKS if device.upper().startswith("GB") else 8,
    )


def forced(model: ModelShape) -> ModelShape:
    """With an even routing, which NVIDIA's recipes of performance force."""
    if model.experts is None:
        return model
    return replace(model, experts=replace(model.experts, is_balance_forced=True))


def read_bridge(record: Record) -> StepRow:
    """Megatron-Bridge's performance summary; shapes by the model's name, forced balance.

    Several releases of one configuration are rows of their own.  Experts are never split over tp.
    A pipeline whose vp is blank is not interleaved where a recipe says so; elsewhere it is left
    out, as chunks decide a third of such a step.
    """
    device = record.text("system").removeprefix("DGX-")
    stated, label = record.text("precision"), record.text("model")
    model = forced(public_shape(label, seq_length=record.whole("seq_len")))
    stack = recipe_stack(f"Megatron-Bridge {record.text('release')}", device)
    par = layout(record, model, stack, etp=1 if model.experts else 0)
    if "w/ mtp" in label.lower():
        model = replace(model, num_prediction_layers=1)
    told = _told(record, model_key(label), device)
    recipe = told.recipe
    flag = joined_flags(
        (not stated, "the precision is not stated"),
        ("pre-train" not in record.text("phase").lower(), "fine-tuning"),
        # An empty cell means one stage where a recipe says so, and nothing where none does.
        (par.pp > 1 and not record.text("vp") and not told.has_degrees, "vp not stated"),
    )
    row = step_row(
        record,
        model=_with_drops(model, label),
        stack=stack,
        parallelism=par,
        device=device,
        precision=stated,
        unmodelled=told.unmodelled(record.text("release")),
        machine=f"{device} Megatron-Bridge {stated or 'unknown'}",
        label=f"{model_key(label)} {stated}",
        measured_s=record.number("step_time_s_derived", "step_time_s"),
        kind=StepKind.DERIVED,
        flag=flag,
    )
    has_predictions = "w/o mtp" not in label.lower()
    return replace(row, config=_cut(switched(row.config, recipe), recipe, has_predictions))


def _with_drops(model: ModelShape, label: str) -> ModelShape:
    if model.experts is None or "tokendrop" not in label.lower():
        return model
    # ``apply_moe_token_drop``: rows are cut, and padded, to the mean.
    experts = replace(model.experts, capacity_factor=1.0, is_padded_to_capacity=True)
    return replace(model, experts=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What recipes tell of a row."""

    recipe: Recipe
    """That of the row's degrees; else what the nearest recipes of its model, device and precision
    agree on; empty where there are none."""
    has_degrees: bool
    release: str
    """Whose recipes these are."""

    def unmodelled(self, release: str) -> tuple[str, ...]:
        """What stays open of a row that was run on ``release``."""
        if not self.has_degrees:
            return _UNTOLD[bool(self.recipe)]
        return () if self.release == release else ("switches of the recipe, from another release",)


def _told(record: Record, model: str, device: str) -> _Told:
    precision = _PRECISIONS.get(record.text("precision").lower(), "")
    degrees = tuple(str(record.whole(name, default=1)) for name in _DEGREES)
    key, own, found = (model, device, precision), record.text("release"), _recipes()
    near = _releases_by_nearness(own)
    for release in near:
        if recipe := found.get((release, *key, *degrees)):
            return _Told(recipe=recipe, has_degrees=True, release=release)
    for release in near:
        alike = (release, *key)
        others = [recipe for known, recipe in found.items() if known[: len(alike)] == alike]
        if others:
            return _Told(recipe=_agreed(others), has_degrees=False, release=release)
    return _Told(recipe={}, has_degrees=False, release=own)


def _releases_by_nearness(release: str) -> tuple[str, ...]:
    """Releases with recipes, by how many lie between; of two as near the earlier one first.

    >>> _releases_by_nearness("26.02")[:3], _releases_by_nearness("25.09")[:2]
    (('26.02', '25.11', '26.02.01'), ('25.11', '26.02'))
    """
    known = sorted({*(key[0] for key in _recipes()), release}, key=_version)
    place = known.index(release)
    ordered = sorted(known, key=lambda one: (abs(known.index(one) - place), known.index(one)))
    return tuple(ordered if any(key[0] == release for key in _recipes()) else ordered[1:])


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


_UNTOLD = (("recompute, graphs and dispatcher of the recipe",), ("recompute of the recipe",))
"""What stays open where no recipe has the degrees; second: all others agree on the rest."""
_OF_SOFTWARE = (
    *("moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm"),
    *("cuda_graph_impl", "cuda_graph_scope"),
)
"""Switches that say what a release does for a model on a device; recomputation and the cut of the
pipeline go with degrees and micro-batch."""


def _agreed(recipes: Sequence[Recipe]) -> Recipe:
    """The switches of software that recipes share; empty where they differ in one."""
    told = {tuple(recipe[name] for name in _OF_SOFTWARE) for recipe in recipes}
    if len(told) != 1:
        return {}
    blank = dict.fromkeys(recipes[0], "")
    return {**blank, **dict(zip(_OF_SOFTWARE, told.pop(), strict=True))}


# Since 26.02 the summary calls current scaling FP8.
_PRECISIONS = {
    "bf16": "bf16",
    "nvfp4": "nvfp4",
    **dict.fromkeys(("fp8", "fp8-cs"), "fp8-cs"),
    **dict.fromkeys(("mxfp8", "fp8-mx"), "fp8-mx"),
}


@lru_cache(maxsize=1)
def _recipes() -> Mapping[tuple[str, ...], Recipe]:
    with _RECIPES.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {tuple(row[name] for name in (*_KEYS, *_DEGREES)): row for row in rows}


def switched(config: RunConfig, cells: Recipe) -> RunConfig:
    """A layout with the switches that cells name by Megatron's arguments; none changes nothing."""
    if not cells:
        return config
    experts = config.model.experts
    if experts is not None:
        is_beside = _is_set(cells, "overlap_moe_expert_parallel_comm")
        delays = cells.get("delay_wgrad_compute", "")
        experts = replace(
            experts,
            dispatcher=Dispatcher(cells["moe_token_dispatcher_type"]),
            overlaps_exchange=is_beside,
            # Recipes switch both on together.
            delays_weight_gradients=delays.lower() == "true" if delays else is_beside,
        )
    modules = tuple(cells["recompute_modules"].replace(",", " ").split())
    num_again = int(float(cells["recompute_num_layers"] or 0))
    recompute = Recompute.SELECTIVE if modules else config.recompute
    impl = cells["cuda_graph_impl"]
    scope = tuple(cells["cuda_graph_scope"].replace(",", " ").split())
    return replace(
        config,
        model=replace(config.model, experts=experts),
        recompute=Recompute.FULL if num_again else recompute,
        recompute_num_layers=num_again,
        recompute_modules=modules if modules != ("core_attn",) else (),
        uses_cuda_graphs=impl not in ("", "none"),
        cuda_graph_scope=("full_iteration",) if impl == "full_iteration" else scope,
    )


def _is_set(cells: Recipe, name: str) -> bool:
    return cells.get(name, "").lower() in ("1", "1.0", "true")


def _cut(config: RunConfig, recipe: Recipe, has_predictions: bool) -> RunConfig:
    """With the chunks of the recipe's pipeline layout, and its layer of further predictions."""
    text = recipe.get("pipeline_model_parallel_layout", "") if recipe else ""
    if not text:
        return config
    chunks = parse_layout(text)
    number = chunks.num_prediction_layers if has_predictions else 0
    par, model = config.parallelism, replace(config.model, num_prediction_layers=number)
    if len(chunks.chunk_layers) == par.num_chunks and sum(chunks.chunk_layers) == model.num_layers:
        par = replace(par, chunk_layers=chunks.chunk_layers)
    return replace(config, model=model, parallelism=par)


def read_card(record: Record) -> StepRow:
    """Megatron-Bridge's verification cards: every switch is a column of its own.

    What a row does not say stays as Bridge has it by default (``alltoall``, no graphs).  Routing
    that is said to be the router's own has the usual imbalance.  Functional runs are flagged: the
    cards themselves call their timing a sanity check.
    """
    if missing := record.unstated("gpus", "global_batch", "micro_batch", "seq_len", "tp", "pp"):
        raise ConfigError(missing)
    device, label = record.text("system").removeprefix("DGX-"), record.text("model")
    stated = record.text("precision")
    model = _card_shape(record)
    stack = _card_stack(record, device)
    row = step_row(
        record,
        model=model,
        stack=stack,
        parallelism=layout(record, model, stack, etp=1 if model.experts else 0),
        device=device,
        precision=stated,
        is_loss_fused=record.is_true("cross_entropy_loss_fusion"),
        unmodelled=tuple(_left_out(record)),
        machine=f"{device} Megatron-Bridge cards {stated or 'unknown'}",
        label=f"{label} {stated}",
        measured_s=record.number("step_time_s_derived", default=_rate_time_s(record, model)),
        memory_nbytes=_GB * record.number("peak_memory_gb", default=0) or None,
        flag=joined_flags(
            (not stated, "the precision is not stated"),
            (record.text("phase") == "LoRA", "LoRA is not modelled"),
            (record.text("phase") == "SFT", "fine-tuning"),
            (record.text("item") == "checkpoint_resume", "resumed run"),
            (record.text("kind") == "pretrain", "functional run"),
        ),
    )
    return replace(row, config=_card_switches(row.config, record), pair=record.text("feature_pair"))


def _rate_time_s(record: Record, model: ModelShape) -> float:
    """From the rate where no time is given: 6 FLOP for each parameter and token, and causal
    attention's 6 x layers x hidden x length (Narayanan et al. 2021, without recomputation)."""
    rate = _TERA * record.number("model_tflops_per_gpu", default=0.0) * record.number("gpus")
    if not rate or model.experts:
        return 0.0
    hidden, width = model.hidden_size, model.kv_channels
    heads = 2 * model.num_attention_heads + 2 * model.num_query_groups
    numel = model.num_layers * hidden * (heads * width + 3 * model.ffn_hidden_size)
    numel += model.vocab_size * hidden
    attention = model.num_layers * hidden * model.seq_length
    tokens = record.number("global_batch") * model.seq_length
    return 6.0 * (numel + attention) * tokens / rate


_GB = 1e9
_TERA = 1e12
_SWITCHES = (
    *("moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    *("cuda_graph_impl", "cuda_graph_scope", "recompute_modules", "recompute_num_layers"),
)


def _card_switches(config: RunConfig, record: Record) -> RunConfig:
    cells = {name: record.text(name) for name in _SWITCHES}
    cells["moe_token_dispatcher_type"] = cells["moe_token_dispatcher_type"] or "alltoall"
    if cells["recompute_modules"] == "[]":
        cells["recompute_modules"] = ""
    is_full = record.text("recompute_granularity") == "full"
    cells["recompute_num_layers"] = ""
    found = switched(config, cells)
    return replace(found, recompute=Recompute.FULL) if is_full else found


def _card_stack(record: Record, device: str) -> Stack:
    """As recipes have it where the row says nothing."""
    stack = recipe_stack(f"Megatron-Bridge {record.text('release')}".strip(), device)
    if record.text("grad_reduce_in_fp32"):
        stack = replace(stack, reduces_grads_in_bf16=not record.is_true("grad_reduce_in_fp32"))
    if record.text("fp8_param_gather"):
        stack = replace(stack, keeps_fp8_params=record.is_true("fp8_param_gather"))
    if record.text("overlap_grad_reduce"):
        stack = replace(stack, overlaps=record.is_true("overlap_grad_reduce"))
    return stack


def _card_shape(record: Record) -> ModelShape:
    """Sizes are columns; the rest is as the released models have it."""
    kind, label = record.text("attention_kind"), record.text("model").lower()
    if "mamba" in kind.lower():
        raise ConfigError("Mamba layers are not modelled; give a transformer")
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    sizes = (*sizes, "num_query_groups", "kv_channels", "vocab_size")
    return ModelShape(
        **{name: record.whole(name) for name in sizes},
        seq_length=record.whole("seq_len"),
        is_gated=True,
        has_bias="gpt oss" in label,
        has_qk_norm="qwen3" in label or kind == "mla",
        is_tied=False,
        normalization=Normalization.RMS_NORM,
        position_embedding=PositionEmbedding.ROPE,
        experts=_card_experts(record),
        latent_attention=_card_latent(record) if kind == "mla" else None,
    )


def _card_experts(record: Record) -> Experts | None:
    if not record.text("num_experts"):
        return None
    num_layers, num_dense = record.whole("num_layers"), record.whole("first_dense_layers")
    return Experts(
        num_experts=record.whole("num_experts"),
        top_k=record.whole("moe_router_topk"),
        ffn_hidden_size=record.whole("moe_ffn_hidden_size"),
        shared_ffn_hidden_size=record.whole("moe_shared_expert_intermediate_size", default=0),
        layer_pattern=tuple(layer >= num_dense for layer in range(num_layers)) if num_dense else (),
        is_grouped=True,
        overlaps_shared=record.is_true("moe_shared_expert_overlap"),
        rank_capacity_factor=record.number("moe_expert_rank_capacity_factor", default=0.0),
        # Pages of Megatron's size where a card says no other.
        stash_factor=1.1 if "paged stash" in record.text("doubt") else 0.0,
        is_balance_forced=record.is_true("moe_router_force_load_balancing"),
    )


def _card_latent(record: Record) -> LatentAttention:
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    # Without a rank queries are projected directly.
    rank = record.whole("q_lora_rank", default=0)
    return LatentAttention(q_lora_rank=rank, **{name: record.whole(name) for name in names})


def _left_out(record: Record) -> list[str]:
    found = ["sliding window"] if "sliding" in record.text("attention_kind") else []
    if record.text("num_experts") and not record.text("moe_token_dispatcher_type"):
        found.append("dispatcher (not stated)")
    return found


FAMILIES = (
    family("Megatron-Bridge", "release system model gpus fsdp tokens_per_s_per_gpu", read_bridge),
    family(
        "Megatron-Bridge cards",
        "release system model gpus fsdp tokens_per_s_per_gpu feature_pair cuda_graph_impl card",
        read_card,
    ),
)
