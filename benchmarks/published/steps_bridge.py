"""Step tables of Megatron-Bridge: its performance summary, and the cards of its repository.

The summary names a model and its degrees.  All other settings of a run are in its recipe, which is
part of the release: ``bridge_recipes.csv`` has these, from ``scripts/performance/configs`` of
NVIDIA-NeMo/Megatron-Bridge (Apache-2.0) at v0.2.0 (25.11), v0.3.0 (26.02), v0.3.1 (26.02.01),
v0.4.0 and v0.4.1 (26.04) and v0.5.0 (26.06); if several recipes of one release have the degrees of
a row and differ, there is none.  If none has the degrees of a row, the row gets the software
switches that all recipes of its release, model, device and precision share.
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
from forerun.calib.records.step_rows import StepKind, StepRow
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.model_shape import (
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    PositionEmbedding,
)
from forerun.calib.workload.pipeline_layout import parse_layout

_RECIPES = Path(__file__).with_name("bridge_recipes.csv")
_NVL72_RANKS = 64
"""GPUs of a rack used as one NVLink domain."""
_KEYS = ("release", "model", "device", "precision")
_DEGREES = ("gpus", "tp", "pp", "cp", "vp", "ep", "micro_batch")
Recipe = Mapping[str, str]


def recipe_stack(framework: str, device: str) -> Stack:
    """Return settings common to all of NVIDIA's recipes: gradients reduced in their own precision,
    weights gathered in that of the products (``grad_reduce_in_fp32=False``,
    ``fp8_param_gather=True`` in the recipes of performance), and products of dense layers
    overlapping their transfers (``tp_comm_overlap`` with a ``userbuffers_*`` preset for each of
    these models: Llama 3 70B and 405B, GPT-3, Nemotron)."""
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
    """Return the model with even routing, which NVIDIA's recipes of performance force."""
    if model.experts is None:
        return model
    return replace(model, experts=replace(model.experts, is_balance_forced=True))


def read_bridge(record: Record) -> StepRow:
    """Read Megatron-Bridge's performance summary; shapes by the model's name, forced balance.

    Several releases of one configuration are separate rows.  Experts are never split over tp.  A
    pipeline whose vp is blank is not interleaved if a recipe says so; otherwise the row is
    excluded, as chunks decide a third of such a step.
    """
    device = record.text("system").removeprefix("DGX-")
    stated, label = record.text("precision"), record.text("model")
    model = forced(public_shape(label, seq_length=record.whole("seq_len")))
    stack = recipe_stack(f"Megatron-Bridge {record.text('release')}", device)
    par = layout(record, model, stack, etp=1 if model.experts else 0)
    if "w/ mtp" in label.lower():
        model = replace(model, num_prediction_layers=1)
    recipe_match = _match_recipe(record, model_key(label), device)
    recipe = recipe_match.recipe
    flag = joined_flags(
        (not stated, "the precision is not stated"),
        ("pre-train" not in record.text("phase").lower(), "fine-tuning"),
        # An empty cell means one stage if a recipe says so, and is unknown if there is no recipe.
        (par.pp > 1 and not record.text("vp") and not recipe_match.has_degrees, "vp not stated"),
    )
    row = step_row(
        record,
        model=_with_drops(model, label),
        stack=stack,
        parallelism=par,
        device=device,
        precision=stated,
        unmodelled=recipe_match.unmodelled(record.text("release")),
        machine=f"{device} Megatron-Bridge {stated or 'unknown'}",
        label=f"{model_key(label)} {stated}",
        measured_s=record.number("step_time_s_derived", "step_time_s"),
        kind=StepKind.DERIVED,
        flag=flag,
    )
    has_predictions = "w/o mtp" not in label.lower()
    return replace(row, config=_cut(with_switches(row.config, recipe), recipe, has_predictions))


def _with_drops(model: ModelShape, label: str) -> ModelShape:
    if model.experts is None or "tokendrop" not in label.lower():
        return model
    # With ``apply_moe_token_drop`` rows are cut, and padded, to the mean.
    experts = replace(model.experts, capacity_factor=1.0, is_padded_to_capacity=True)
    return replace(model, experts=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecipeMatch:
    """Settings of a row that recipes provide."""

    recipe: Recipe
    """The recipe of the row's degrees; else the common settings of the nearest recipes of its
    model, device and precision; empty if there are none."""
    has_degrees: bool
    release: str
    """Release that these recipes belong to."""

    def unmodelled(self, release: str) -> tuple[str, ...]:
        """Return the settings that stay unknown for a row run on ``release``."""
        if not self.has_degrees:
            return _UNTOLD[bool(self.recipe)]
        return () if self.release == release else ("switches of the recipe, from another release",)


def _match_recipe(record: Record, model: str, device: str) -> _RecipeMatch:
    precision = _PRECISIONS.get(record.text("precision").lower(), "")
    degrees = tuple(str(record.whole(name, default=1)) for name in _DEGREES)
    key, row_release, recipes = (model, device, precision), record.text("release"), _recipes()
    near = _releases_by_nearness(row_release)
    for release in near:
        if recipe := recipes.get((release, *key, *degrees)):
            return _RecipeMatch(recipe=recipe, has_degrees=True, release=release)
    for release in near:
        alike = (release, *key)
        others = [recipe for known, recipe in recipes.items() if known[: len(alike)] == alike]
        if others:
            return _RecipeMatch(recipe=_agreed(others), has_degrees=False, release=release)
    return _RecipeMatch(recipe={}, has_degrees=False, release=row_release)


def _releases_by_nearness(release: str) -> tuple[str, ...]:
    """Return releases with recipes, by the number of releases between; ties go to the earlier one.

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
"""Unknown settings if no recipe has the degrees; second: if all others agree on the rest."""
_OF_SOFTWARE = (
    *("moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm"),
    *("cuda_graph_impl", "cuda_graph_scope"),
)
"""Switches that a release sets for a model on a device; recomputation and the pipeline's layout
depend on degrees and micro-batch."""


def _agreed(recipes: Sequence[Recipe]) -> Recipe:
    """Return the software switches that recipes share; empty if any of them differ."""
    software_stacks = {tuple(recipe[name] for name in _OF_SOFTWARE) for recipe in recipes}
    if len(software_stacks) != 1:
        return {}
    blank = dict.fromkeys(recipes[0], "")
    return {**blank, **dict(zip(_OF_SOFTWARE, software_stacks.pop(), strict=True))}


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


def with_switches(config: RunConfig, cells: Recipe) -> RunConfig:
    """Set the switches that cells name by Megatron's arguments; without cells nothing changes."""
    if not cells:
        return config
    experts = config.model.experts
    if experts is not None:
        is_overlapped = _is_set(cells, "overlap_moe_expert_parallel_comm")
        delays = cells.get("delay_wgrad_compute", "")
        experts = replace(
            experts,
            dispatcher=Dispatcher(cells["moe_token_dispatcher_type"]),
            overlaps_exchange=is_overlapped,
            # Recipes enable both together.
            delays_weight_gradients=delays.lower() == "true" if delays else is_overlapped,
        )
    modules = tuple(cells["recompute_modules"].replace(",", " ").split())
    num_recomputed = int(float(cells["recompute_num_layers"] or 0))
    recompute = Recompute.SELECTIVE if modules else config.recompute
    impl = cells["cuda_graph_impl"]
    scope = tuple(cells["cuda_graph_scope"].replace(",", " ").split())
    return replace(
        config,
        model=replace(config.model, experts=experts),
        recompute=Recompute.FULL if num_recomputed else recompute,
        recompute_num_layers=num_recomputed,
        recompute_modules=modules if modules != ("core_attn",) else (),
        uses_cuda_graphs=impl not in ("", "none"),
        cuda_graph_scope=("full_iteration",) if impl == "full_iteration" else scope,
    )


def _is_set(cells: Recipe, name: str) -> bool:
    return cells.get(name, "").lower() in ("1", "1.0", "true")


def _cut(config: RunConfig, recipe: Recipe, has_predictions: bool) -> RunConfig:
    """Return the layout with the chunks of the recipe's pipeline layout, and its MTP layer."""
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
    """Read Megatron-Bridge's verification cards: every switch is a column of its own.

    Unstated settings are Bridge's defaults (``alltoall``, no graphs).  If routing is stated as the
    router's own, it has the usual imbalance.  Functional runs are flagged: the cards themselves
    call their timing a sanity check.
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
        unmodelled=tuple(_unmodelled_parts(record)),
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
    """Return the time from the rate if no time is given: 6 FLOP for each parameter and token, and
    causal attention's 6 x layers x hidden x length (Narayanan et al. 2021, without
    recomputation)."""
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
    switched_config = with_switches(config, cells)
    return replace(switched_config, recompute=Recompute.FULL) if is_full else switched_config


def _card_stack(record: Record, device: str) -> Stack:
    """Return the card's settings, with those of recipes as defaults."""
    stack = recipe_stack(f"Megatron-Bridge {record.text('release')}".strip(), device)
    if record.text("grad_reduce_in_fp32"):
        stack = replace(stack, reduces_grads_in_bf16=not record.is_true("grad_reduce_in_fp32"))
    if record.text("fp8_param_gather"):
        stack = replace(stack, keeps_fp8_params=record.is_true("fp8_param_gather"))
    if record.text("overlap_grad_reduce"):
        stack = replace(stack, overlaps=record.is_true("overlap_grad_reduce"))
    return stack


def _card_shape(record: Record) -> ModelShape:
    """Return the model from size columns; all else is as in the released models."""
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
        # Page size is Megatron's default unless a card states another.
        stash_factor=1.1 if "paged stash" in record.text("doubt") else 0.0,
        is_balance_forced=record.is_true("moe_router_force_load_balancing"),
    )


def _card_latent(record: Record) -> LatentAttention:
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    # Queries are projected directly if there is no rank.
    rank = record.whole("q_lora_rank", default=0)
    return LatentAttention(q_lora_rank=rank, **{name: record.whole(name) for name in names})


def _unmodelled_parts(record: Record) -> list[str]:
    parts = ["sliding window"] if "sliding" in record.text("attention_kind") else []
    if record.text("num_experts") and not record.text("moe_token_dispatcher_type"):
        parts.append("dispatcher (not stated)")
    return parts


FAMILIES = (
    family("Megatron-Bridge", "release system model gpus fsdp tokens_per_s_per_gpu", read_bridge),
    family(
        "Megatron-Bridge cards",
        "release system model gpus fsdp tokens_per_s_per_gpu feature_pair cuda_graph_impl card",
        read_card,
    ),
)
