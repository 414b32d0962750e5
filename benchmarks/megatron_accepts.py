"""Launch lines of random layouts, checked by an unmodified Megatron-LM's own parser and validation.

    python benchmarks/megatron_accepts.py CLONE [--layouts 300] [--seed 0] [--out FILE]

``CLONE`` is an exported core_v0.16.1.  A host's command (dense or MoE, in several styles) is read,
a random layout of its model is drawn, and the line that ``plan --show`` would print is passed to
``parse_args``, ``validate_args``, ``core_transformer_config_from_args``, the optimizer's and the
buckets' configuration, the micro-batch calculator and the groups of ranks.  Stubbed: a GPU of
Hopper's capability (``--calibrate-device cpu``'s), Transformer Engine's version (2.10), whose
FusedAdam is not used, and no process group.  Layouts that our own rules refuse are not counted, but
reported, with the number of those that Megatron would have accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import random
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from forerun.calib.arguments import (
    VARIABLES,
    LaunchLine,
    config_from_command,
    launch_line,
    refusals,
)
from forerun.calib.errors import ConfigError
from forerun.calib.records import Launch
from forerun.calib.search import layout_label
from forerun.calib.workload import Batch, Recompute, RunConfig, Sharding, uneven_layers

_COMMON = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-5 "
    "--train-iters 1000 --use-mcore-models --disable-bias-linear --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --no-rope-fusion --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --save here --save-interval 100"
)
HOSTS: Mapping[str, str] = {
    "gpt 175b": (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 51199 --micro-batch-size 1 "
        "--global-batch-size 1536 --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 3 --fp16 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 1000 "
        "--recompute-activations --hidden-dropout 0.1 --attention-dropout 0.1"
    ),
    "llama 70b": (
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 "
        "--max-position-embeddings 8192 --vocab-size 127999 --micro-batch-size=1 "
        f"--global-batch-size=1024 --tensor-model-parallel-size=4 {_COMMON} "
        "--pipeline-model-parallel-size=4 --decoder-first-pipeline-num-layers 19 "
        "--decoder-last-pipeline-num-layers 19 --use-distributed-optimizer --tp-comm-overlap "
        "--sequence-parallel --overlap-grad-reduce --defer-embedding-wgrad-compute "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4"
    ),
    "llama 8b under FSDP": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 8192 --vocab-size 127999 --micro-batch-size 2 "
        f"--global-batch-size 512 {_COMMON} --use-megatron-fsdp --use-distributed-optimizer "
        "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor "
        "--overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion"
    ),
    "mixtral 8x7b": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 32768 --vocab-size 31999 --micro-batch-size 1 "
        f"--global-batch-size 256 {_COMMON} --num-experts 8 --moe-router-topk 2 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    ),
    "deepseek 671b": (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 129279 "
        f"--micro-batch-size 1 --global-batch-size 4096 {_COMMON} --multi-latent-attention "
        "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
        "--moe-grouped-gemm --moe-token-dispatcher-type flex --moe-router-dtype fp32 "
        "--mtp-num-layers 1 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
        "--pipeline-model-parallel-size 16 "
        "--pipeline-model-parallel-layout Et*3|(tt|)*29m|L "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--recompute-granularity selective --recompute-modules mla_up_proj moe_act layernorm"
    ),
}
"""Commands as users write them, each in a different style."""
_RANKS = {"gpt 175b": 128, "llama 70b": 64, "llama 8b under FSDP": 64, "mixtral 8x7b": 64}
_NUMBERS_OF_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
_MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts")
_UNSTATED_FIELDS = frozenset({"device", "framework", "unmodelled"})
_OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnLayout:
    """One layout with its launch line."""

    host: str
    config: RunConfig
    line: LaunchLine
    refused: tuple[str, ...]


def main() -> int:
    """Draw, check and print; return 1 if a line was rejected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clone", type=Path, metavar="CLONE", help="exported core_v0.16.1")
    parser.add_argument("--layouts", type=int, default=300, help="to ask for (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--out", type=Path, help="lines and reasons as JSON")
    args = parser.parse_args()
    megatron = _megatron(args.clone)
    reasons: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    rows, too_strict = [], Counter[str]()
    checked: Counter[str] = Counter()
    for one in draws(random.Random(args.seed)):
        if checked.total() == args.layouts:
            break
        why = megatron.refusal(one)
        if not why and not one.refused and (lost := _lost(one)):
            why = f"taken, but it says another {', '.join(lost)}"
        if one.refused:
            ours.update(one.refused)
            if not why:
                too_strict.update(one.refused)
            continue
        checked[one.host] += 1
        reasons.update([why] if why else [])
        label = layout_label(one.config)
        rows.append({"host": one.host, "layout": label, "why": why, "line": one.line.command})
    num = checked.total()
    print(f"accepted {num - reasons.total()} of {num}: {dict(checked)}")
    for why, count in reasons.most_common():
        print(f"  {count} x {why}")
    print("refused by our own rules, and not asked for (of these taken by its checks alone):")
    for why, count in ours.most_common():
        print(f"  {count} ({too_strict[why]}) x {why}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(reasons.total() > 0)


def draws(rng: random.Random) -> Iterator[DrawnLayout]:
    """Yield valid layouts without end, each host in turn."""
    running = {name: running_of(name) for name in HOSTS}
    while True:
        for name, (launch, config) in running.items():
            drawn = None
            while drawn is None:
                drawn = _drawn(rng, config)
            yield DrawnLayout(
                host=name,
                config=drawn,
                line=launch_line(launch, config, drawn),
                refused=refusals(drawn),
            )


def running_of(name: str) -> tuple[Launch, RunConfig]:
    """Return a host's launch and layout, on nodes of 8 H100."""
    num_ranks = _RANKS.get(name, 512)
    launcher = ("torchrun", "--nproc-per-node", "8", "--nnodes", str(num_ranks // 8))
    argv = ("pretrain_gpt.py", *HOSTS[name].split())
    launch = Launch(
        launcher=launcher, argv=argv, num_nodes=num_ranks // 8, ranks_per_node=8,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )  # fmt: skip
    config = config_from_command((*launcher, *argv)).config
    return launch, dataclasses.replace(config, device="NVIDIA H100 80GB HBM3")


def _drawn(rng: random.Random, running: RunConfig) -> RunConfig | None:
    """Return a layout of the same model; None if it does not divide."""
    model, running_parallelism, num_ranks = (
        running.model,
        running.parallelism,
        rng.choice(_NUMBERS_OF_RANKS),
    )
    tp, cp, pp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 1, 2, 4)), rng.choice((1, 2, 4, 8, 16))
    dp, rest = divmod(num_ranks, tp * cp * pp)
    ep = rng.choice([1, 2, 4, 8, 16, 32, 64]) if model.experts else 1
    if rest or not dp or running.batch.global_batch_size % dp:
        return None
    micro = rng.choice([1, 2, 4])
    vp = rng.choice([1, 1, 2, 3, 4]) if pp > 1 else 1
    is_on = rng.random() < 0.7
    deep = [Sharding.GRADS, Sharding.WEIGHTS] if is_on and pp == 1 else []
    sharding = rng.choice([Sharding.OPTIMIZER] * 3 + deep)
    overlaps = is_on and rng.random() < 0.6
    try:
        parallelism = dataclasses.replace(
            running_parallelism, tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, vp=vp,
            etp=rng.choice([0, 1]) if model.experts and tp > 1 else 0,
            chunk_layers=_chunks(rng, model.num_layers, pp, vp),
            microbatch_group_size=0,
            is_sequence_parallel=tp > 1 and (model.experts is not None or rng.random() < 0.7),
            is_optimizer_distributed=is_on,
            sharding=sharding,
            regathers_weights=sharding is not Sharding.WEIGHTS or rng.random() < 0.7,
            num_optimizer_instances=rng.choice([1, 1, 2]) if is_on else 1,
            overlaps_grad_reduce=overlaps or rng.random() < 0.3,
            overlaps_param_gather=overlaps,
            overlaps_tp=running_parallelism.overlaps_tp and rng.random() < 0.5,
            overlaps_p2p=pp == 2 or rng.random() < 0.8 if vp > 1 else True,
        )  # fmt: skip
        return _varied(rng, dataclasses.replace(
            running, parallelism=parallelism,
            batch=Batch(
                micro_batch_size=micro, global_batch_size=running.batch.global_batch_size
            ),
            recompute=Recompute.NONE, recompute_num_layers=0, recompute_modules=(),
        ))  # fmt: skip
    except ConfigError:
        return None


def _chunks(rng: random.Random, num_layers: int, pp: int, vp: int) -> tuple[int, ...]:
    """Return layers of each chunk: mostly even if they divide, else uneven at random."""
    if num_layers % (pp * vp) == 0 and rng.random() < 0.7:
        return ()
    if vp == 1 and rng.random() < 0.5:
        return uneven_layers(num_layers, pp)
    places = sorted(rng.sample(range(1, num_layers), min(pp * vp, num_layers) - 1))
    edges = [0, *places, num_layers]
    chunks = tuple(b - a for a, b in pairwise(edges))
    return () if len(set(chunks)) == 1 else chunks


def _varied(rng: random.Random, config: RunConfig) -> RunConfig:
    """Vary recompute, offload and, with experts, overlap."""
    changes: dict[str, Any] = {"recompute": (recompute := rng.choice(list(Recompute)))}
    if recompute is Recompute.FULL:
        changes["recompute_num_layers"] = rng.choice([0, 1, 2])
    if recompute is Recompute.SELECTIVE:
        modules = tuple(rng.sample(_MODULES, rng.choice([0, 1, 2])))
        changes["recompute_modules"] = () if modules == ("core_attn",) else modules
    if rng.random() < 0.2:
        changes["offload_modules"] = tuple(rng.sample(_OFFLOADED, 2))
    if rng.random() < 0.2 and config.parallelism.is_optimizer_distributed:
        changes["optimizer_offload_frac"] = rng.choice([0.5, 1.0])
    experts = config.model.experts
    if experts is not None:
        overlaps = rng.random() < 0.3
        experts = dataclasses.replace(
            experts, overlaps_exchange=overlaps, delays_weight_gradients=overlaps
        )
        changes["model"] = dataclasses.replace(config.model, experts=experts)
    return dataclasses.replace(config, **changes)


class MegatronParser:
    """An imported Megatron-LM; its output to standard output is dropped."""

    def __init__(self, arguments: types.ModuleType) -> None:
        self._arguments = arguments

    def refusal(self, one: DrawnLayout) -> str:
        """Return its error message if it rejects the line; empty if it accepts."""
        environ = {"WORLD_SIZE": str(one.config.parallelism.num_ranks), "RANK": "1"}
        _set_environment({**environ, **one.line.environment})
        words = [word.text for phrase in one.line.program for word in phrase.words]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                self._ask(words)
        except (SystemExit, Exception) as err:
            last = [line for line in output.getvalue().splitlines() if "error:" in line]
            text = str(err) if not isinstance(err, SystemExit) else " ".join(last[-1:])
            return f"{type(err).__name__}: {' '.join(text.split())[:200]}"
        return ""

    def _ask(self, words: Sequence[str]) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.num_microbatches_calculator import (
            destroy_num_microbatches_calculator,
            init_num_microbatches_calculator,
        )

        sys.argv = list(words)
        args = self._arguments.validate_args(self._arguments.parse_args())
        self._arguments.core_transformer_config_from_args(args)
        names = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
        DistributedDataParallelConfig(**{n: getattr(args, n) for n in names if hasattr(args, n)})
        _check_optimizer(args)
        destroy_num_microbatches_calculator()
        init_num_microbatches_calculator(
            0, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size,
            args.data_parallel_size, False,
        )  # fmt: skip
        _check_groups(args)


def _check_optimizer(args: Any) -> None:
    """Check ``OptimizerConfig``'s rules except for FusedAdam, which is Transformer Engine's."""
    from megatron.core.optimizer import OptimizerConfig

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    try:
        OptimizerConfig(**given)
    except RuntimeError as err:
        if "FusedAdam" not in str(err):
            raise


def _check_groups(args: Any) -> None:
    """Make the ranks of every kind of group, by Megatron's own generators."""
    from megatron.core.parallel_state import RankGenerator

    tp, pp, ep = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, 1
    cp, dp = args.context_parallel_size, args.data_parallel_size
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=cp, order=order).get_ranks("dp")
    etp, ep = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    expert_dp, rest = divmod(args.world_size, etp * ep * pp)
    if rest:
        raise RuntimeError(f"world_size {args.world_size} does not split over {etp} x {ep} x {pp}")
    RankGenerator(tp=etp, ep=ep, dp=expert_dp, pp=pp, cp=1, order=order).get_ranks("dp")
    instances = args.num_distributed_optimizer_instances
    if (dp * cp) % instances or expert_dp % instances:
        raise RuntimeError(f"{instances} instances do not divide dp {dp} x cp {cp}, {expert_dp}")
    if instances > 1 and not args.use_distributed_optimizer:
        raise RuntimeError("several instances need the distributed optimizer")


def _lost(one: DrawnLayout) -> list[str]:
    """Return fields of the layout that are lost when its line is read like any command."""
    words = [word.text for phrase in (*one.line.start, *one.line.program) for word in phrase.words]
    parsed = config_from_command(words).config
    # Megatron pads the vocabulary to 128 x tp; an alternative to the running layout keeps its
    # padding.
    model = dataclasses.replace(parsed.model, vocab_size=one.config.model.vocab_size)
    parsed = dataclasses.replace(parsed, model=model)
    fields = {field.name for field in dataclasses.fields(RunConfig)} - _UNSTATED_FIELDS
    if one.config.optimizer_offload_frac:
        fields -= {"optimizer_state_nbytes"}  # needs the optimizer of exact states
    if one.config.parallelism.shards_weights and not one.config.parallelism.regathers_weights:
        fields -= {"fuses_gradient_accumulation"}  # PyTorch's FSDP2 supports none
    return sorted(n for n in fields if getattr(parsed, n) != getattr(one.config, n))


def _set_environment(values: Mapping[str, str]) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(values)


def _megatron(clone: Path) -> MegatronParser:
    """Import the clone's argument module, with stubs for what this machine lacks."""
    sys.path.insert(0, str(clone))
    warnings.simplefilter("ignore")
    from forerun.recipes.stand_in_cuda.install import install

    install()
    logging.disable(logging.CRITICAL)
    from packaging.version import Version

    utils = __import__("megatron.core.utils", fromlist=["_te_version"])
    utils._te_version = Version("2.10.0")
    return MegatronParser(__import__("megatron.training.arguments", fromlist=["parse_args"]))


if __name__ == "__main__":
    sys.exit(main())
