"""Clean launches, and the changes to them that trigger each rule."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.calib.arguments.launchers import split_variables
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.lint.rule import Remedy, StatedLaunch, stated_launch

GPU = "NVIDIA H100 80GB HBM3"
_SIZES = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 --swiglu --bf16 "
    "--position-embedding-type rope --disable-bias-linear --hidden-dropout 0.1 "
)
_GOOD = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--cross-entropy-loss-fusion --no-check-for-nan-in-loss-and-grad --manual-gc "
    "--manual-gc-interval 100 --save out --save-interval 1000 --async-save "
    "--use-persistent-ckpt-worker --log-interval 10 --eval-interval 1000 --eval-iters 10 "
    "--train-iters 10000 --num-workers 2 "
)
_FRONT = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG=WARN torchrun --nproc-per-node 8 pretrain_gpt.py "
)
DENSE = (
    f"{_FRONT}{_SIZES}{_GOOD}--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--micro-batch-size 1 --global-batch-size 16 "
)
EXPERTS = (
    f"CUDA_DEVICE_MAX_CONNECTIONS=8 torchrun --nproc-per-node 8 pretrain_gpt.py {_SIZES}{_GOOD}"
    "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 1024 "
    "--micro-batch-size 1 --global-batch-size 16 "
)
FLAT = f"{_FRONT}{_SIZES}{_GOOD}--micro-batch-size 1 --global-batch-size 64 "
"""Launch with replicas only."""
CLEAN = {"dense": DENSE, "experts": EXPERTS, "flat": FLAT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A clean launch with one flaw."""

    base: str = DENSE
    drop: tuple[str, ...] = ()
    put: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    device: str = GPU

    @property
    def launch(self) -> StatedLaunch:
        return launch_of(self.words, device=self.device)

    @property
    def words(self) -> list[str]:
        phrases = shlex.split(self.put)
        put: list[tuple[str, ...]] = []
        for word in phrases:
            if word.startswith("--"):
                put.append((word,))
            else:
                put[-1] = (*put[-1], word)
        worse = Remedy(what="", put=tuple(put), drop=self.drop, variables=self.variables)
        return remedied(shlex.split(self.base), worse)


CASES: Mapping[str, Case] = {
    "precision": Case(drop=("--bf16",)),
    "bf16-before-ampere": Case(device="Tesla V100-SXM2-32GB"),
    "bf16-and-fp16": Case(put="--fp16"),
    "param-gather": Case(drop=("--use-distributed-optimizer",)),
    "cross-entropy-fusion-impl": Case(put="--cross-entropy-fusion-impl te"),
    "overlap-grad-reduce": Case(drop=("--overlap-grad-reduce", "--overlap-param-gather")),
    "overlap-param-gather": Case(drop=("--overlap-param-gather",)),
    "tp-comm-overlap": Case(drop=("--tp-comm-overlap",)),
    "overlap-p2p": Case(
        put="--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--tensor-model-parallel-size 1 --no-overlap-p2p-communication",
        drop=("--sequence-parallel", "--tp-comm-overlap"),
    ),
    "moe-dispatcher": Case(base=EXPERTS, put="--moe-token-dispatcher-type allgather"),
    "masked-softmax-fusion": Case(put="--no-masked-softmax-fusion --transformer-impl local"),
    "gradient-accumulation-fusion": Case(put="--no-gradient-accumulation-fusion"),
    "cross-entropy-loss-fusion": Case(drop=("--cross-entropy-loss-fusion",)),
    "attention-backend": Case(put="--attention-backend unfused"),
    "transformer-impl": Case(put="--transformer-impl local"),
    "rope-fusion": Case(put="--no-rope-fusion"),
    "bias-swiglu-fusion": Case(put="--no-bias-swiglu-fusion"),
    "bias-gelu-fusion": Case(
        put="--no-bias-gelu-fusion", drop=("--swiglu", "--disable-bias-linear")
    ),
    "bias-dropout-fusion": Case(put="--no-bias-dropout-fusion"),
    "head-size": Case(put="--kv-channels 60"),
    "moe-grouped-gemm": Case(base=EXPERTS, drop=("--moe-grouped-gemm",)),
    "moe-permute-fusion": Case(base=EXPERTS, drop=("--moe-permute-fusion",)),
    "timing-log-level": Case(put="--timing-log-level 2"),
    "log-interval": Case(put="--log-interval 1"),
    "log-params-norm": Case(put="--log-params-norm"),
    "log-num-zeros-in-grad": Case(put="--log-num-zeros-in-grad"),
    "profile": Case(put="--profile"),
    "record-memory-history": Case(put="--record-memory-history"),
    "check-for-nan": Case(drop=("--no-check-for-nan-in-loss-and-grad",)),
    "deterministic-mode": Case(put="--deterministic-mode"),
    "empty-unused-memory": Case(put="--empty-unused-memory-level 1"),
    "num-workers": Case(put="--num-workers 0"),
    "manual-gc": Case(drop=("--manual-gc", "--manual-gc-interval")),
    "ckpt-format": Case(
        put="--ckpt-format torch", drop=("--async-save", "--use-persistent-ckpt-worker")
    ),
    "async-save": Case(drop=("--async-save", "--use-persistent-ckpt-worker")),
    "async-save-worker": Case(drop=("--use-persistent-ckpt-worker",)),
    "CUDA_LAUNCH_BLOCKING": Case(variables={"CUDA_LAUNCH_BLOCKING": "1"}),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Case(variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "NCCL_DEBUG": Case(variables={"NCCL_DEBUG": "INFO"}),
    "TORCH_DISTRIBUTED_DEBUG": Case(variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    "TORCH_NCCL_BLOCKING_WAIT": Case(variables={"TORCH_NCCL_BLOCKING_WAIT": "1"}),
    "NCCL_P2P_DISABLE": Case(variables={"NCCL_P2P_DISABLE": "1"}),
    "NCCL_SHM_DISABLE": Case(variables={"NCCL_SHM_DISABLE": "1"}),
    "NCCL_IB_DISABLE": Case(
        base=DENSE.replace("torchrun", "torchrun --nnodes 2"), variables={"NCCL_IB_DISABLE": "1"}
    ),
    "NCCL_ALGO": Case(variables={"NCCL_ALGO": "Ring"}),
    "NCCL_PROTO": Case(variables={"NCCL_PROTO": "Simple"}),
    "PYTORCH_CUDA_ALLOC_CONF": Case(
        put="--use-nccl-ub", variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": Case(variables={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    "OMP_NUM_THREADS": Case(put="--optimizer-cpu-offload --use-precision-aware-optimizer"),
    "eval-interval": Case(put="--eval-interval 2"),
    "save-interval": Case(
        put="--save-interval 2", drop=("--async-save", "--use-persistent-ckpt-worker")
    ),
}
"""Cases by the name of their rule."""


def launch_of(words: Sequence[str], *, device: str = GPU) -> StatedLaunch:
    """Return the launch of a command on a device."""
    _, command = split_variables(words)
    config = replace(config_from_command(command).config, device=device)
    return stated_launch(words, config)


def remedied(words: Sequence[str], remedy: Remedy) -> list[str]:
    """Return a command with a remedy applied, written as a user would."""
    variables, command = split_variables(words)
    variables.update(remedy.variables)
    replaced = {phrase[0] for phrase in remedy.put} | set(remedy.drop)
    remaining: list[str] = []
    is_dropped = False
    for word in command:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] in replaced
        if not is_dropped:
            remaining.append(word)
    front = [f"{name}={value}" for name, value in variables.items() if value]
    return [*front, *remaining, *(word for phrase in remedy.put for word in phrase)]
