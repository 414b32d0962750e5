"""Megatron-LM's argument names for ``pretrain_gpt.py``; the defaults suit two CPU cores."""

from __future__ import annotations

import argparse
import sys


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the checked arguments; exits with status 2 if they are inconsistent."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py", description="Pre-train a GPT on bytes with megatron.core alone."
    )
    _add_model(parser)
    _add_parallelism(parser)
    _add_training(parser)
    _add_data(parser)
    _add_running(parser)
    args = parser.parse_args(argv)
    try:
        _complete(args)
    except ValueError as err:
        parser.error(str(err))
    return args


def fit_to_world(args: argparse.Namespace, world_size: int) -> None:
    """Derive data-parallel size and micro-batches; exits if they do not fit."""
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if world_size % ranks:
        sys.exit(f"world size {world_size} is not a multiple of TP x PP = {ranks}; add ranks")
    args.world_size = world_size
    args.data_parallel_size = world_size // ranks
    per_pass = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % per_pass:
        sys.exit(
            f"global batch size {args.global_batch_size} is not a multiple of micro-batch size x DP"
            f" = {per_pass}; nearest: {max(1, args.global_batch_size // per_pass) * per_pass}"
        )
    args.num_microbatches = args.global_batch_size // per_pass
    stages = args.pipeline_model_parallel_size
    if args.virtual_pipeline_model_parallel_size and args.num_microbatches % stages:
        sys.exit(
            f"{args.num_microbatches} micro-batches are not a multiple of PP {stages}, which "
            "interleaving needs; change the global batch size"
        )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, default=4)
    group.add_argument("--hidden-size", type=int, default=128)
    group.add_argument("--ffn-hidden-size", type=int)
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=int, default=1)
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument("--max-position-embeddings", type=int)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--disable-bias-linear", action="store_true")
    group.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope"),
        default="learned_absolute",
    )
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument(
        "--vocab-size", type=int, default=256, help="rows of the embedding; data uses 256 of them"
    )
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=64)
    group.add_argument("--attention-dropout", type=float, default=0.0)
    group.add_argument("--hidden-dropout", type=float, default=0.0)
    group.add_argument("--init-method-std", type=float, default=0.02)


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--overlap-param-gather", action="store_true")
    group.add_argument("--ddp-bucket-size", type=int, help="parameters per bucket")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument("--recompute-method", choices=("uniform", "block"))
    group.add_argument("--recompute-num-layers", type=int)
    group.add_argument("--distributed-backend", choices=("nccl", "gloo"), default="nccl")
    group.add_argument(
        "--fake-process-group",
        action="store_true",
        help="one process plays rank RANK of WORLD_SIZE; nothing is transferred, losses mean "
        "nothing",
    )
    group.add_argument("--distributed-timeout-minutes", type=int, default=10)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=2)
    group.add_argument("--global-batch-size", type=int, default=16)
    group.add_argument("--train-iters", type=int, default=100)
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument(
        "--lr-decay-style", choices=("constant", "linear", "cosine"), default="cosine"
    )
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument(
        "--use-cpu-initialization",
        action="store_true",
        help="draw the weights on the CPU, the same ones in every layout; always so without CUDA",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path",
        nargs="+",
        help="files, read as bytes; default: the sources of Python's standard library",
    )
    group.add_argument("--mock-data", action="store_true", help="counting bytes, no files")


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation, checkpoints, exit, logs")
    group.add_argument("--eval-interval", type=int, default=1000)
    group.add_argument("--eval-iters", type=int, default=0)
    group.add_argument("--save")
    group.add_argument("--load")
    group.add_argument("--save-interval", type=int)
    group.add_argument("--exit-interval", type=int)
    group.add_argument("--exit-duration-in-mins", type=float)
    group.add_argument("--exit-signal-handler", action="store_true")
    group.add_argument("--log-interval", type=int, default=1)
    group.add_argument("--wandb-project")
    group.add_argument("--wandb-exp-name")
    group.add_argument("--wandb-save-dir", default=".")


def _complete(args: argparse.Namespace) -> None:
    heads, tensor = args.num_attention_heads, args.tensor_model_parallel_size
    if args.hidden_size % heads:
        raise ValueError(f"hidden size {args.hidden_size} is not a multiple of {heads} heads")
    if not args.group_query_attention:
        args.num_query_groups = heads
    if heads % args.num_query_groups or args.num_query_groups % tensor:
        raise ValueError(
            f"{args.num_query_groups} query groups must divide {heads} heads and be a multiple of "
            f"TP {tensor}"
        )
    if args.sequence_parallel and tensor == 1:
        args.sequence_parallel = False  # as Megatron-LM: nothing to split
    if args.overlap_param_gather and not (
        args.use_distributed_optimizer and args.overlap_grad_reduce
    ):
        raise ValueError(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
        )
    if args.recompute_granularity == "full" and not args.recompute_method:
        args.recompute_method = "uniform"
    if args.recompute_method and not args.recompute_num_layers:
        args.recompute_num_layers = 1
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = int(wide * 2 / 3) // 64 * 64 if args.swiglu else wide
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    _complete_stages(args)
    unit = args.make_vocab_size_divisible_by * tensor
    if args.vocab_size < 256:
        raise ValueError(f"vocabulary size {args.vocab_size} is below the 256 values of a byte")
    args.padded_vocab_size = -(-args.vocab_size // unit) * unit


def _complete_stages(args: argparse.Namespace) -> None:
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if layers % stages:
        raise ValueError(f"{layers} layers do not split over PP {stages}")
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    args.virtual_pipeline_model_parallel_size = None
    if per_chunk is None:
        return
    if stages < 2 or (layers // stages) % per_chunk:
        raise ValueError(
            f"{per_chunk} layers per virtual stage do not split {layers} layers over PP {stages}; "
            "interleaving needs PP 2 or more"
        )
    if layers // stages > per_chunk:
        args.virtual_pipeline_model_parallel_size = layers // stages // per_chunk
