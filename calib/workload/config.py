"""Configuration of a run: model shape, parallelism, batch, precision, recompute, overlap, cadence.

A ``RunConfig`` is complete: with a calibration it determines the operators, the timeline and the
forecast.  A *layout* is a ``RunConfig`` that differs from the running one in parallelism,
micro-batch size or recompute.  The rules that a layout must satisfy are checked on construction;
each error states value, rule and remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from ..errors import ConfigError
from ..plain_json import Json
from .argument_fields import arguments_of, listed, number, real, switch, words
from .config_json import Encoded, decode
from .model_shape import (
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    PositionEmbedding,
    at_least_one,
    at_most,
    not_negative,
)
from .parallelism import ContextComm, Engine, Parallelism, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Micro-batch and global batch."""

    micro_batch_size: int = number("micro_batch_size")
    """Samples of one forward pass."""
    global_batch_size: int = number("global_batch_size", unsaid=0, is_stated=True)
    """Samples of one step, over all replicas."""

    def __post_init__(self) -> None:
        at_least_one("micro_batch_size", self.micro_batch_size)
        at_least_one("global_batch_size", self.global_batch_size)


class CheckpointForm(Enum):
    """How a run saves its state, which decides what other layouts can load."""

    UNKNOWN = "unknown"
    NONE = "none"
    """Nothing is saved or loaded, so that any launch begins anew."""
    WEIGHTS = "weights"
    """Without the optimizer's states, so that every restart loses them."""
    BY_RANK = "torch"
    """A file for each rank of the model."""
    BY_BUFFER = "torch_dist"
    """Weights by name, states of the distributed optimizer as its buffers hold them."""
    BY_WEIGHT = "torch_dist, fully reshardable"
    """All states by the name of their weight."""
    BY_SHARD = "fsdp_dtensor"
    """Tensors of FSDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Length of the run, and events between steps; 0 means never or unknown."""

    train_iters: int = number("train_iters", default=0)
    eval_interval: int = number("eval_interval", default=0)
    eval_iters: int = number("eval_iters", default=0, is_stated=True)
    save_interval: int = number("save_interval", default=0)
    rampup_batch_size: tuple[int, ...] = ()
    """First global batch size, its increment, and samples until it is reached."""
    step_batch_size_schedule: str = ""
    """``TOKENS:SIZE TOKENS:SIZE …`` of core 0.18 and later, replaces the ramp."""
    full_batch_size: int = 0
    """Global batch size after the ramp; 0 means that of ``RunConfig.batch``."""
    is_saving: bool = False
    """True if there is a save folder: the last step and new batch sizes are saved as well."""
    num_final_evals: int = 0
    """Evaluations after the last step: Megatron's are on the validation and on the test set."""
    exit_interval: int = 0
    """The process ends after a step whose number this divides."""
    checkpoint_form: CheckpointForm = CheckpointForm.UNKNOWN
    """How the state is saved."""

    def __post_init__(self) -> None:
        for name in ("train_iters", "eval_interval", "eval_iters", "save_interval"):
            at_most(name, getattr(self, name))
        for name in ("full_batch_size", "num_final_evals", "exit_interval"):
            at_most(name, getattr(self, name))


__all__ = [
    "Attention",
    "Batch",
    "Cadence",
    "CheckpointForm",
    "ContextComm",
    "Dispatcher",
    "Engine",
    "Experts",
    "Fp8Recipe",
    "LatentAttention",
    "ModelShape",
    "Normalization",
    "Parallelism",
    "PositionEmbedding",
    "Precision",
    "Recompute",
    "RunConfig",
    "Sharding",
]
_BATCH_ALONE = ("transformers", "Lightning", "PyTorch", "torchtitan")
"""Host frameworks whose degrees are set in user code; a command line changes only their batch."""


class Recompute(Enum):
    """Activations that the backward phase recomputes."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Precision(Enum):
    """Arithmetic of the forward and backward phases; parameters and gradients follow Megatron."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def nbytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self is Precision.FP32 else 2


class Fp8Recipe(Enum):
    """Recipe of linear products in 8 bits, by Megatron's name; everything else stays in 16."""

    NONE = "none"
    DELAYED = "delayed"
    TENSORWISE = "tensorwise"
    MXFP8 = "mxfp8"
    BLOCKWISE = "blockwise"
    NVFP4 = "nvfp4"
    """4 bits, on devices that support them."""


class Attention(Enum):
    """Kernels of attention."""

    AUTO = "auto"
    """Fused on an accelerator that has a kernel for it, unfused on the CPU."""
    FUSED = "fused"
    """No seq x seq matrix is stored."""
    UNFUSED = "unfused"


_WITH_TRANSFORMER_ENGINE = ("megatron-core", "megatron-lm", "megatron-bridge", "nemo")
"""Name prefixes of frameworks that use Transformer Engine by default."""
TORCHTITAN = "torchtitan"
_WITH_FLASH_ATTENTION = ("nanotron", "llm-foundry", TORCHTITAN)
"""Name prefixes of frameworks that call FlashAttention-2 by name."""
_CUDNN_FIRST = re.compile(r"\bg?b[23]00\b")
"""Devices on which torchtitan calls cuDNN's attention instead (``_init_backend`` of its attention:
compute capability 10.0)."""
_OLD = re.compile(r"\b([vp]100|p40?|k80|t4|t40|gtx|titan|quadro|rtx[ -]?20[678]0)\b")
"""NVIDIA devices before Ampere, for which neither flash-attn 2 nor cuDNN has fused attention
(flash-attn's README; TransformerEngine, attention/dot_product_attention/utils.py: sm80)."""
VOCAB_MULTIPLE = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``, which it multiplies by tp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Encoded):
    """Everything that determines a step, plus the cadence of the run."""

    model: ModelShape
    """Sizes of the model."""
    parallelism: Parallelism
    """Degrees and overlap."""
    batch: Batch
    """Micro-batch and global batch."""
    precision: Precision = Precision.FP32
    """Arithmetic of the forward and backward phases."""
    fp8: Fp8Recipe = Fp8Recipe.NONE
    """Recipe of linear products in 8 or 4 bits; NONE: 16 or 32 bits."""
    keeps_fp8_params: bool = False
    """Weights are gathered and stored in 8 bits (``--fp8-param-gather``)."""
    wide_layers: tuple[int, int] = (0, 0)
    """First and last layers of an fp8 model whose products stay in 16 bits
    (``--first-last-layers-bf16``)."""
    attention: Attention = field(
        default=Attention.AUTO,
        metadata=words(
            "attention_backend",
            Attention.AUTO,
            spelled={"flash": Attention.FUSED, "local": Attention.UNFUSED},
            unknown=Attention.AUTO,
        ),
    )
    """Kernels of attention."""
    recompute: Recompute = Recompute.NONE
    """Activations that the backward phase recomputes."""
    recompute_num_layers: int = 0
    """Layers of each chunk that are recomputed under ``FULL``; 0 means all."""
    recompute_modules: tuple[str, ...] = ()
    """Modules that are recomputed under ``SELECTIVE``, by Megatron's names; empty: core_attn."""
    recompute_span: int = 1
    """Consecutive layers that are recomputed together, from the input of their first, if all are
    recomputed (``--recompute-method uniform --recompute-num-layers``)."""
    distributes_saved_activations: bool = False
    """The saved input of a recomputed layer is split over tp and gathered for the recompute."""
    hidden_dropout: float = real("hidden_dropout", is_stated=True)
    """Probability; above 0 the backward phase needs a mask."""
    attention_dropout: float = real("attention_dropout", is_stated=True)
    """Probability; above 0 the backward phase needs a mask."""
    is_softmax_fused: bool = switch("masked_softmax_fusion", default=True)
    """Scale, mask and softmax of unfused attention are one kernel."""
    is_softmax_wide: bool = switch(
        "attention_softmax_in_fp32", "apply_query_key_layer_scaling", default=True, unsaid=False
    )
    """Without that kernel softmax runs in fp32."""
    is_loss_fused: bool = switch("cross_entropy_loss_fusion", is_of_layout=True)
    """Cross-entropy is one kernel."""
    keeps_fp32_logits: bool = True
    """The loss works on an fp32 copy of the logits; Transformer Engine's works in place."""
    fuses_head: bool = False
    """Output product and loss run together, piece by piece, so that whole logits never exist
    (``--cross-entropy-fusion-impl linear``, Liger's head, torchtitan's chunked loss)."""
    fuses_gradient_accumulation: bool = switch(
        "gradient_accumulation_fusion", default=True, is_of_layout=True
    )
    """Weight gradients are accumulated within their products."""
    fuses_norms: bool = field(default=False, compare=False)
    """Norms before attention and MLP run inside the products after them, as Transformer Engine's
    do on an accelerator.  Older files lack this field, so layouts that differ only in it are equal;
    Megatron's attention kernels differ along with it."""
    reduces_grads_in_bf16: bool = False
    """Gradients are stored and reduced in 16 bits: Megatron's default in fp16, unless
    ``--accumulate-allreduce-grads-in-fp32`` is given, and an option in bf16
    (``--grad-reduce-in-bf16``)."""
    has_open_widths: bool = False
    """Bits of reduced gradients and optimizer states are unstated: Megatron's defaults are assumed,
    with wider intervals of time and memory."""
    has_open_memory: bool = field(default=False, compare=False)
    """A setting that moves memory is not modelled, so that memory may be off by a factor of 2."""
    optimizer_state_nbytes: int = 0
    """Bytes of optimizer states per parameter; 0: two moments in fp32 and, in mixed precision, a
    copy in fp32."""
    optimizer_offload_frac: float = real(
        "optimizer_offload_fraction", usual=1.0, behind="optimizer_cpu_offload", is_of_layout=True
    )
    """Share of the optimizer's states in host memory."""
    overlaps_optimizer_offload: bool = switch(
        "overlap_cpu_optimizer_d2h_h2d", behind="optimizer_cpu_offload", is_of_layout=True
    )
    """Transfers of gradients and weights overlap the host's update."""
    is_compiled: bool = False
    """Layers are compiled (``torch.compile``), which retain only tensors that the backward phase
    reads."""
    sharded_update_calls: int = 0
    """Optimizer calls per step over the whole model, one per tensor that it iterates over, if
    weights are sharded tensors (DTensor).  0: shards are plain."""
    defers_head_gradients: bool = switch("defer_embedding_wgrad_compute", is_of_layout=True)
    """Weight gradients of the output table are deferred to the end of the last stage's passes."""
    head_deferral_limit: int = number(
        "wgrad_deferral_limit",
        default=0,
        behind="defer_embedding_wgrad_compute",
        is_of_layout=True,
    )
    """Most micro-batches with deferred gradients; 0: all."""
    offload_modules: tuple[str, ...] = listed(
        "offload_modules", behind="fine_grained_activation_offloading", is_of_layout=True
    )
    """Modules whose inputs are in host memory until the backward phase, by Megatron's names."""
    uses_cuda_graphs: bool = False
    """Host launches are replayed, so that they cost nothing."""
    cuda_graph_scope: tuple[str, ...] = ()
    """Modules of a layer that are replayed, by Megatron's names (``attn``, ``moe_router``, ...), or
    ``full_iteration``; empty: whole layers."""
    cadence: Cadence = field(default_factory=Cadence)
    """Length of the run, evaluations and saves."""
    device: str = "cpu"
    """Driver's name of the accelerator, or ``cpu``."""
    framework: str = ""
    """Host framework and version, for the report."""
    unmodelled: tuple[str, ...] = ()
    """Names of run settings that are not modelled; listed in every report."""
    program: str = field(default="", compare=False)
    """Training script, for messages; empty if unknown."""
    absent: tuple[str, ...] = field(default=(), compare=False)
    """Layout options that the program does not accept, and ``transformer_engine`` if that is not
    installed; empty if nothing is missing or known.  Does not affect the workload."""
    given: tuple[str, ...] = field(default=(), compare=False)
    """Layout options as the description spells them, if ours spell the same setting differently."""

    def __post_init__(self) -> None:
        not_negative("recompute_num_layers", self.recompute_num_layers)
        at_least_one("recompute_span", self.recompute_span)
        not_negative("optimizer_state_nbytes", self.optimizer_state_nbytes)
        not_negative("sharded_update_calls", self.sharded_update_calls)
        not_negative("head_deferral_limit", self.head_deferral_limit)
        not_negative("wide_layers", min(self.wide_layers))
        for name in ("hidden_dropout", "attention_dropout", "optimizer_offload_frac"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                word = "share" if name.endswith("frac") else "probability"
                raise ConfigError(f"{name} {value} is not a {word}; give one from 0 to 1")
        check_layout(self.model, self.parallelism, self.batch)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank in one step."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.parallelism.dp)

    @property
    def recomputes_all(self) -> bool:
        """True if every layer is recomputed as a whole."""
        return self.recompute is Recompute.FULL and not self.recompute_num_layers

    @property
    def recomputes_logits(self) -> bool:
        """True if the backward pass computes the logits again, as Megatron's fused head does; those
        of other stacks compute its gradients with the loss."""
        return self.fuses_head and takes_options(self)

    def is_wide(self, layer: int) -> bool:
        """Return True if the layer's products stay in 16 bits in an fp8 model."""
        first, last = self.wide_layers
        is_end = layer < first or layer >= self.model.num_layers - last
        return is_end and self.fp8 is not Fp8Recipe.NONE

    @property
    def num_deferred_heads(self) -> int:
        """Micro-batches whose output-table gradients are deferred to the end of the passes."""
        if not self.defers_head_gradients or self.parallelism.pp == 1:
            return 0
        return min(self.head_deferral_limit or self.num_microbatches, self.num_microbatches)

    @property
    def bubble_frac(self) -> float:
        """Bubble of a stage in 1F1B, plain or interleaved, over its busy time:
        (pp - 1) / (vp x micro-batches) (Narayanan et al. 2021, section 2.2)."""
        par = self.parallelism
        return (par.pp - 1) / (par.vp * self.num_microbatches)

    @property
    def chunk_layers(self) -> tuple[int, ...]:
        """Transformer layers of each chunk, in model order."""
        par = self.parallelism
        return par.chunk_layers or (self.model.num_layers // par.num_chunks,) * par.num_chunks

    @property
    def local_seq_length(self) -> int:
        """Positions of each sequence on one context-parallel rank."""
        return self.model.seq_length // self.parallelism.cp

    @property
    def is_attention_fused(self) -> bool:
        """True if no seq x seq matrix is stored."""
        if self.attention is Attention.AUTO:
            is_megatron = self.parallelism.engine is Engine.MEGATRON
            return self.device != "cpu" and not (is_megatron and self.is_before_ampere)
        return self.attention is Attention.FUSED

    @property
    def is_before_ampere(self) -> bool:
        """True for an NVIDIA device that lacks bf16 and Megatron's fused attention."""
        return _OLD.search(self.device.lower()) is not None

    @property
    def is_without_tensor_cores(self) -> bool:
        """True if 16-bit products run at the rate of fp32 at best: bf16 before Ampere."""
        return self.precision is Precision.BF16 and self.is_before_ampere

    @property
    def softmax_nbytes(self) -> int:
        """Bytes per element in which unfused attention computes its softmax.

        The fused softmax kernel does not exist on the CPU.
        """
        is_wide = self.is_softmax_wide and (self.device == "cpu" or not self.is_softmax_fused)
        return 4 if is_wide or self.precision is Precision.FP32 else 2

    @property
    def is_attention_generic(self) -> bool:
        """True if fused 16-bit attention may run in a kernel that is not made for the device:
        Transformer Engine chooses one that is, other stacks run the kernel of PyTorch or
        flash-attn, which may be a generation older."""
        name, device = self.framework.lower(), self.device.lower()
        is_made_for_it = name.startswith(_WITH_TRANSFORMER_ENGINE)
        is_made_for_it |= name.startswith(TORCHTITAN) and _CUDNN_FIRST.search(device) is not None
        is_narrow = self.precision is not Precision.FP32
        return self.is_attention_fused and is_narrow and not (self.fuses_norms or is_made_for_it)

    @property
    def may_run_flash_2(self) -> bool:
        """True for fused 16-bit attention."""
        return self.is_attention_fused and self.precision is not Precision.FP32

    @property
    def is_attention_unstated(self) -> bool:
        """True if attention is generic and its kernel is unstated."""
        is_stated = self.framework.lower().startswith(_WITH_FLASH_ATTENTION)
        return self.is_attention_generic and not is_stated

    @property
    def is_eager_torch(self) -> bool:
        """True under PyTorch's own stack without ``torch.compile``, as its user said."""
        return self.parallelism.engine is Engine.TORCH and not self.is_compiled

    @property
    def has_norms_inside(self) -> bool:
        """True if norms run inside products: never on the CPU, only under Megatron."""
        is_possible = self.device != "cpu" and self.parallelism.engine is Engine.MEGATRON
        return self.fuses_norms and is_possible

    @property
    def is_step_replayed(self) -> bool:
        """True if one CUDA graph captures the whole iteration."""
        return self.uses_cuda_graphs and "full_iteration" in self.cuda_graph_scope

    @property
    def grad_nbytes(self) -> int:
        """Bytes of a gradient element as stored and reduced."""
        return 2 if self.reduces_grads_in_bf16 and self.precision is not Precision.FP32 else 4

    @property
    def optimizer_moved_nbytes(self) -> int:
        """Bytes that the optimizer moves per parameter updated on the device; 0 if neither the
        width of its states nor their offload is stated.

        States are read and written, the gradient is read for the norm and for the update and
        zeroed, 16-bit weights are read and written.  FP32 weights count as states.
        """
        is_stated = self.optimizer_state_nbytes or self.optimizer_offload_frac
        # The optimizer of a user's own loop is timed as it is, whole or over shards.
        if not is_stated or self.sharded_update_calls:
            return 0
        is_full = self.precision is Precision.FP32
        states = self.optimizer_state_nbytes or (8 if is_full else 12)
        return 2 * states + 3 * self.grad_nbytes + (8 if is_full else 4)

    def does_work_of(self, other: RunConfig) -> bool:
        """Return True if a step of both trains one model on as many samples on one kind of device,
        so that their times are comparable.

        Kernels, precision and the routing of experts may differ, and so may the padding of the
        vocabulary, which depends on tp.
        """
        padding = VOCAB_MULTIPLE * max(self.parallelism.tp, other.parallelism.tp)
        return (
            self.device == other.device
            and self.batch.global_batch_size == other.batch.global_batch_size
            and self.model.seq_length == other.model.seq_length
            and self.model.bare == other.model.bare
            and abs(self.model.vocab_size - other.model.vocab_size) < padding
        )

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks of a stage, by their place in the model."""
        par = self.parallelism
        return tuple(range(stage, par.num_chunks, par.pp))

    def layers_of(self, chunk: int) -> range:
        """Return the layers of a chunk, counted from 0."""
        begin = sum(self.chunk_layers[:chunk])
        return range(begin, begin + self.chunk_layers[chunk])

    @staticmethod
    def from_json(value: Mapping[str, Json]) -> RunConfig:
        """Return the config from ``to_json`` output; unknown keys are ignored, missing ones get
        defaults."""
        return decode(RunConfig, value)


switch_values: Callable[[RunConfig], tuple[bool, ...]] = attrgetter(
    *(name for name, argument in arguments_of(RunConfig).items() if argument.is_switch)
)
"""Return the values of a config's switches."""


def check_layout(model: ModelShape, par: Parallelism, batch: Batch) -> None:
    """Raise ``ConfigError`` (value, rule, remedy) if the layout cannot run."""
    _check_chunks(model, par)
    _check_degrees(model, par)
    _check_replicas(par)
    _check_sequence(model, par)
    _check_experts(model, par)
    share = batch.micro_batch_size * par.dp
    if batch.global_batch_size % share:
        raise ConfigError(
            f"global_batch_size {batch.global_batch_size} is not a multiple of micro_batch_size "
            f"{batch.micro_batch_size} x dp {par.dp}; nearest that is: "
            f"{max(1, round(batch.global_batch_size / share)) * share}"
        )
    num_microbatches = batch.global_batch_size // share
    at_most("num_microbatches", num_microbatches)
    if par.vp > 1:
        _check_groups(par, num_microbatches)


def _check_groups(par: Parallelism, num: int) -> None:
    """Check the rule of Megatron's interleaved schedule (core 0.16.1)."""
    group = par.microbatch_group_size or par.pp
    if par.pp == 2 and not par.overlaps_p2p:
        raise ConfigError(
            f"vp {par.vp} on 2 stages needs messages that overlap, but they do not; leave "
            f"--no-overlap-p2p-communication out or set vp 1"
        )
    if not par.pp <= group <= num:
        raise ConfigError(
            f"microbatch_group_size {group} is not between pp {par.pp} and num_microbatches {num}, "
            f"as interleaving needs; change micro_batch_size or set vp 1"
        )
    if 0 < num % group < par.pp:
        raise ConfigError(
            f"num_microbatches {num} is not a multiple of the group of {group} that interleaving "
            f"needs, nor leaves pp {par.pp} or more; change micro_batch_size or set vp 1"
        )


def _check_chunks(model: ModelShape, par: Parallelism) -> None:
    if par.chunk_layers:
        if sum(par.chunk_layers) != model.num_layers or min(par.chunk_layers) < 0:
            raise ConfigError(
                f"chunk_layers {par.chunk_layers} hold {sum(par.chunk_layers)} layers, not "
                f"num_layers {model.num_layers}; make them add up"
            )
    elif model.num_layers % par.num_chunks:
        raise ConfigError(
            f"num_layers {model.num_layers} does not split over pp {par.pp} x vp {par.vp}; "
            f"nearest that do: {_nearest_splits(model.num_layers, par.pp, par.vp)}"
        )
    if par.vp > 1 and par.pp < 2:
        raise ConfigError(f"vp {par.vp} needs a pipeline, but pp is {par.pp}; set pp >= 2 or vp 1")


def _check_degrees(model: ModelShape, par: Parallelism) -> None:
    for name in ("num_attention_heads", "ffn_hidden_size", "vocab_size"):
        if getattr(model, name) % par.tp:
            raise ConfigError(
                f"{name} {getattr(model, name)} is not a multiple of tp {par.tp}; "
                f"choose tp from {_divisors(getattr(model, name))}"
            )
    groups = model.num_query_groups
    if groups % par.tp and par.tp % groups:
        raise ConfigError(
            f"num_query_groups {groups} is neither a multiple nor a divisor of tp {par.tp}; "
            f"choose tp from {_divisors(groups)}"
        )


def _check_replicas(par: Parallelism) -> None:
    """Check ``initialize_model_parallel``'s rule (core 0.16.1) for dense and expert replicas."""
    for name, replicas in (("dp x cp", par.dp * par.cp), ("expert dp", par.expert_dp)):
        if replicas % par.num_optimizer_instances:
            raise ConfigError(
                f"num_optimizer_instances {par.num_optimizer_instances} does not divide {name} "
                f"{replicas}; choose from {_divisors(replicas)}"
            )


def _check_sequence(model: ModelShape, par: Parallelism) -> None:
    if model.seq_length % (2 * par.cp) and par.cp > 1:
        raise ConfigError(
            f"seq_length {model.seq_length} is not a multiple of 2 x cp {par.cp}, as balanced "
            f"causal attention needs; choose cp from {_divisors(model.seq_length // 2)}"
        )
    local = model.seq_length // par.cp
    if par.is_sequence_parallel and local % par.tp:
        raise ConfigError(
            f"seq_length {model.seq_length} over cp {par.cp} is not a multiple of tp {par.tp}; "
            f"choose tp from {_divisors(local)} or leave sequence parallelism off"
        )
    groups = model.num_query_groups
    heads = min(model.num_attention_heads, groups)
    if par.exchanged_cp > 1 and heads % (par.tp * par.exchanged_cp):
        raise ConfigError(
            f"{heads} heads or groups are not a multiple of tp {par.tp} x cp {par.exchanged_cp}, "
            f"as the exchange a2a needs; choose cp from {_divisors(max(1, heads // par.tp))} or p2p"
        )
    if par.cp % par.exchanged_cp:
        raise ConfigError(
            f"cp {par.cp} is not a multiple of the {par.exchanged_cp} ranks that exchange heads; "
            "give hierarchical sizes whose product is cp"
        )


def _check_experts(model: ModelShape, par: Parallelism) -> None:
    experts = model.experts
    if experts is None:
        if par.ep > 1:
            raise ConfigError(f"ep {par.ep} needs experts, but the model has none; set ep 1")
        return
    if experts.num_experts % par.ep:
        raise ConfigError(
            f"num_experts {experts.num_experts} is not a multiple of ep {par.ep}; "
            f"choose ep from {_divisors(experts.num_experts)}"
        )
    for name, width, tp in (
        ("expert ffn_hidden_size", experts.ffn_hidden_size, par.expert_tp),
        ("shared_ffn_hidden_size", experts.shared_ffn_hidden_size, par.tp),
    ):
        if width % tp:
            raise ConfigError(
                f"{name} {width} is not a multiple of its tp {tp}; choose tp or expert tp from "
                f"{_divisors(width)}"
            )
    if par.tp > 1 and not par.is_sequence_parallel:
        # ``MoELayer.forward`` of core 0.16.1 refuses to train in this combination.
        raise ConfigError(
            f"experts with tp {par.tp} need sequence parallelism, but it is off; give "
            f"--sequence-parallel or set tp 1"
        )


def _divisors(number: int) -> str:
    divisors = [d for d in (1, 2, 4, 8, 16, 32, 64) if number % d == 0]
    return ", ".join(str(d) for d in divisors)


def _nearest_splits(num_layers: int, pp: int, vp: int) -> str:
    pairs = [
        (abs(p * v - pp * vp), abs(p - pp), p, v)
        for p in range(1, num_layers + 1)
        for v in range(1, max(vp, 1) + 1)
        if num_layers % (p * v) == 0 and (v == 1 or p > 1)
    ]
    return ", ".join(f"pp {p} x vp {v}" for _, _, p, v in sorted(pairs)[:2])


def takes_options(running: RunConfig) -> bool:
    """Return False if the run's host framework does not take layouts as Megatron's options."""
    return not running.framework.startswith(_BATCH_ALONE)
