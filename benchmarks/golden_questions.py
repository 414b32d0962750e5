"""Questions of ``golden_answers.py``: the words of each verb, and the files that they name."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOG = ROOT / "tests" / "golden" / "megatron_logs" / "every_fifth_with_saves.log"
MACHINE = "H100 DGXC BF16"
RECORDED = ("cpu", "quick", "tp2", "pp2", "ep2", "mixed8")
_LINE = (
    "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --bf16 --num-layers 32 --hidden-size "
    "4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size "
    "32000 --micro-batch-size 1 --global-batch-size 512 --use-distributed-optimizer"
)
LINE = _LINE.split()
_MOE = (
    "torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --bf16 --fp8-format hybrid "
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
    "--group-query-attention --num-query-groups 4 --seq-length 8192 --max-position-embeddings 8192 "
    "--vocab-size 128000 --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1408 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--recompute-granularity selective --swiglu --micro-batch-size 1 --global-batch-size 256"
)
_LONG = (
    "torchrun --nproc-per-node 8 --nnodes 64 pretrain_gpt.py --bf16 --num-layers 80 --hidden-size "
    "8192 --num-attention-heads 64 --seq-length 8192 --max-position-embeddings 8192 --vocab-size "
    "32000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--num-layers-per-virtual-pipeline-stage 5 --recompute-granularity full --recompute-method "
    "uniform --recompute-num-layers 1 --micro-batch-size 1 --global-batch-size 1024"
)
_GPT = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 "
    "--num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 "
    "--micro-batch-size 1 --global-batch-size 64"
)
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_WINDOWED = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_HYBRID = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
    "intermediate_size": 21504, "num_hidden_layers": 8, "hybrid_override_pattern": "M-M-M*-M",
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "expand": 2, "chunk_size": 256, "vocab_size": 131072,
    "max_position_embeddings": 8192, "mlp_hidden_act": "relu2", "torch_dtype": "bfloat16",
}  # fmt: skip
_NCCL_TESTS = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8388608 maxBytes 33554432 step: 2(factor) validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid   1001 on      node0 device  0 [0x1b] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1002 on      node1 device  0 [0x43] NVIDIA H100 80GB HBM3
#                                                     out-of-place            in-place
#       size count type redop root time algbw busbw #wrong time algbw busbw #wrong
#        (B)    (elements)             (us)  (GB/s)  (GB/s)      (us)  (GB/s)  (GB/s)
    8388608   2097152   float   sum   -1    992.6    8.45    8.45      0    986.0 8.51 8.51 0
   16777216   4194304   float   sum   -1   1334.9   12.57   12.57      0   1336.5 12.5 12.5 0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 10.5
"""
_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=4
GPUS=${GPUS:-8}
TP=$((GPUS / 2))
MODEL=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32)
if [ "$SLURM_JOB_NUM_NODES" ]; then NODES=$SLURM_JOB_NUM_NODES; else NODES=2; fi
case $TP in 4) RECOMPUTE="--recompute-granularity selective" ;; *) RECOMPUTE= ;; esac
torchrun --nproc-per-node $GPUS --nnodes $NODES pretrain_gpt.py --bf16 "${MODEL[@]}" \\
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 \\
    --global-batch-size 128 --tensor-model-parallel-size $TP --sequence-parallel $RECOMPUTE
"""


def _inspected(rank: int) -> str:
    """Return one rank's log of NCCL Inspector: two transfers of the size that its README shows."""
    metadata = {"inspector_output_format_version": "v4.0", "hostname": "n", "pid": 1}
    names = {"coll": "ReduceScatter", "coll_msg_size_bytes": 2147483648}
    return "".join(
        json.dumps(
            {
                "header": {"id": "0x7f8c496ae9f661", "rank": rank, "n_ranks": 8, "nnodes": 1},
                "metadata": metadata,
                "coll_perf": {**names, "coll_sn": place, "coll_exec_time_us": 41057 + rank},
            }
        )
        + "\n"
        for place in (7, 8)
    )


FILES = {
    "llama/config.json": json.dumps(_LLAMA),
    "latent.json": json.dumps(_LATENT),
    "hybrid.json": json.dumps(_HYBRID),
    "windowed.json": json.dumps(_WINDOWED),
    "nccl_tests.log": _NCCL_TESTS,
    "train.sh": _SCRIPT,
    "ray.sh": (
        'source "${HERE}/models/qwen3-4B.sh"\n'
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 ${MODEL_ARGS[@]} --lr 1\n"
    ),
    "start.sh": _SCRIPT.replace(
        "torchrun --nproc-per-node $GPUS", "srun torchrun --nproc-per-node 8"
    ),
    **{f"inspected/{rank}.log": _inspected(rank) for rank in range(8)},
    "t5.json": json.dumps({"model_type": "t5", "d_model": 512, "is_encoder_decoder": True}),
    "bert.json": json.dumps({"model_type": "bert", "hidden_size": 768, "type_vocab_size": 2}),
    "encoder.json": json.dumps({"architectures": ["BertForMaskedLM"], "hidden_size": 768}),
    "adapter_config.json": json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/m"}),
    "job.sbatch": "",
    "exported.sh": f"export NCCL_PROTO=LL\n{_GPT}\n",
    "empty/records/r1/rank-0.jsonl": "",
}
"""Text of the files that questions name."""
QUESTIONS: dict[str, tuple[str, ...]] = {
    **{
        f"{place}_{name}": (verb, place, *words)
        for place in RECORDED
        for name, verb, words in (
            ("report", "report", ()),
            ("status", "status", ()),
            ("running", "explain", ("running",)),
            ("explain", "explain", ("running", "1")),
            ("plan", "plan", ("--top", "5")),
            ("larger", "predict", ("--mbs", "4", "--gpus", "4")),
        )
    },
    **{
        f"{place}_{name}": (verb, place, *words)
        for place in ("cpu", "quick")
        for name, verb, words in (
            ("devices", "plan", ("--device", "H100,B200", "--gpus", "8,64", "--top", "2")),
            ("h100", "predict", ("--device", "H100", "--gpus", "8")),
        )
    },
    "two_runs": ("diff", "cpu", "quick"),
    "table_plan": ("plan", "table", "--machine", MACHINE, "--top", "5"),
    "table_predict": ("predict", "table", "--machine", MACHINE, "--mbs", "2"),
    "table_normal": ("normal", "table", "--machine", MACHINE),
    "quick_command": ("plan", "quick", "--show", "1"),
    "tp2_command": ("plan", "tp2", "--show", "2"),
    "tp2_many": ("plan", "tp2", "--device", "H100", "--gpus", "512..1024", "--top", "1"),
    "pp2_why": ("plan", "pp2", "--why", "tp=2,pp=1", "--keep", "mbs=2|4"),
    "quick_lint": ("doctor", "quick", "--", *LINE),
    "h200_report": ("report", "h200"),
    "h200_running": ("explain", "h200", "running"),
    "h200_larger": ("predict", "h200", "--mbs", "8"),
    "h200_plan": ("plan", "h200", "--gpus", "8,64", "--gbs", "16xGPUS", "--top", "3"),
    "h200_devices": (
        *("plan", "h200", "--device", "B200,A100", "--gpus", "16", "--gbs", "64", "--top", "3"),
    ),
    "h200_like": ("predict", "h200_small", "--like", "h200", "--mbs", "4", "--seq", "2048"),
    "h200_normal": ("normal", "h200"),
    "h200_records_report": ("report", "h200_records", "--full"),
    "h200_diff": ("diff", "h200_small", "h200_records"),
    "tp2_cost": (
        *("plan", "tp2", "--device", "H100", "--gpus", "8", "--gbs", "2xGPUS", "--top", "3"),
        *("--price-per-gpu-hour", "2.5", "--objective", "cost", "--tokens", "1B"),
    ),
    "tp2_tokens": ("predict", "tp2", "--tokens", "1B", "--tp", "1", "--dp", "2"),
    "tp2_misfit": ("predict", "tp2", "--tp", "3"),
    "pp2_prices": (
        *("plan", "pp2", "--device", "H100,B200", "--gpus", "16", "--seq", "64", "--top", "4"),
        *("--price-per-gpu-hour", "2.5,4", "--keep", "tp=1|2,sharding=1|2|3"),
    ),
    "pp2_memory": ("plan", "pp2", "--memory-gib", "0.4", "--top", "3"),
    "ep2_also": ("predict", "ep2", "--also", "mixed8", "--ep", "1"),
    "ep2_unread": ("predict", "ep2", "--", "torchrun", "pretrain_gpt.py", "--nosuch", "3"),
    "ep2_other": ("predict", "ep2", "--", *_MOE.split()),
    "mixed8_like": ("predict", "mixed8", "--like", "tp2"),
    "mixed8_two": ("explain", "mixed8", "1", "tp4,pp1"),
    "mixed8_named": ("explain", "mixed8", "TP2 DP4 mbs2"),
    "mixed8_faster": ("diff", "tp2", "mixed8", "--fail-over", "0.05"),
    "mixed8_page": ("diff", "tp2", "mixed8", "--markdown"),
    "one_run": ("diff", "cpu", "cpu"),
    "other_models": ("diff", "tp2", "pp2"),
    "quick_written": ("plan", "quick", "--top", "2", "--write", "row.sh"),
    "absent_plan": ("plan", "absent"),
    "absent_device": ("predict", "--device", "H9000", "--", *LINE),
    "cpu_normal": ("normal", "tp2"),
    "tp2_lint": ("doctor", "tp2"),
    "nowhere_lint": (
        *("doctor", "--device", "H100", "--fail-over", "0.01", "--mtbf-hours", "20", "--"),
        *("NCCL_DEBUG=INFO", "CUDA_DEVICE_MAX_CONNECTIONS=8"),
        *(word for word in LINE if word != "--bf16"),
        *("--tensor-model-parallel-size", "8", "--save-interval", "10", "--save", "x"),
    ),
    "nowhere_offload": (
        *("predict", "--device", "H100", "--", *LINE, "--transformer-impl", "transformer_engine"),
        *("--fine-grained-activation-offloading", "--offload-modules", "attn_norm", "core_attn"),
    ),
    "nowhere_latent": (
        *("predict", "--device", "B200", "--gpus", "16", "--gbs", "64", "--ep", "8"),
        *("--config", "latent.json"),
    ),
    "nowhere_windowed": (
        *("predict", "--device", "H100", "--gpus", "32", "--gbs", "64", "--seq", "16384"),
        *("--config", "windowed.json"),
    ),
    "nowhere_chunked": (
        *("predict", "--device", "H100", "--", *LINE, "--window-size", "1023,0"),
        *("--window-attn-skip-freq", "4", "--context-parallel-size", "2"),
    ),
    "nowhere_hybrid": ("predict", "--device", "H100", "--gpus", "8", "--config", "hybrid.json"),
    "nowhere_sourced": ("predict", "--device", "H100", "--", "bash", "ray.sh"),
    "nowhere_sourced_sizes": ("predict", "--device", "H100", "--gpus", "8", "--", "bash", "ray.sh"),
    "nowhere_settings": (
        *("predict", "--device", "A100", "--", "python", "pretrain.py", "trainer.devices=8"),
        *("trainer.num_nodes=1", "model.micro_batch_size=1"),
    ),
    "nowhere_experts_tp": (
        *("predict", "--device", "H100", "--gpus", "16", "--gbs", "64", "--seq", "4096"),
        *("--tp", "2", "--config", "latent.json"),
    ),
    "nowhere_shell": ("predict", "--device", "H100", "--gpus", "16", "--", "bash", "train.sh"),
    "nowhere_slurm": (
        "plan",
        "--device",
        "H100",
        "--gpus",
        "32",
        "--top",
        "2",
        "--",
        "sbatch",
        "start.sh",
    ),
    "import_tests": ("import", "nccl-tests", "nccl_tests.log", "--out", "a.csv", "--fabric", "f"),
    "import_inspected": (
        *("import", "nccl-inspector", *(f"inspected/{rank}.log" for rank in range(8))),
        *("--out", "b.csv", "--fabric", "f", "--device", "H100"),
    ),
    "logged_report": ("report", "logged"),
    "logged_status": ("status", "logged"),
    "nowhere_moe": ("predict", "--device", "H100", "--", *_MOE.split()),
    "nowhere_long": ("predict", "--device", "A100", "--", *_LONG.split()),
    "nowhere_amd": ("predict", "--device", "MI300X", "--", *LINE),
    "nowhere_hf": ("predict", "--device", "B200", "--gpus", "8", "--config", "llama/config.json"),
    "nowhere_experts": (
        *("predict", "--device", "H200", "--gpus", "16", "--gbs", "64", "--config"),
        str(ROOT / "recipes" / "experts.yaml"),
    ),
    "nowhere_script": (
        *("predict", "--device", "H100", "--", "bash"),
        str(ROOT / "recipes" / "megatron_one_node.sh"),
    ),
    "mixed8_report": ("report", "mixed8", "--full"),  # the other runs' are brief
    "nowhere_predict": ("predict", "--device", "H100", "--tokens", "1T", "--", *LINE),
    "nowhere_plan": ("plan", "--device", "H100,B200", "--gpus", "64", "--top", "2", "--", *LINE),
}
_H100 = "predict --device H100"
_SRUN = f"srun {_GPT[_GPT.index('pretrain') :]}"
_MINE = f"torchrun --nproc-per-node 2 mine.py {_GPT[_GPT.index('--num') :]}"
_SBATCH = "predict --device H100 --gpus 16 --sbatch go"
_ONE = "plan cpu --keep tp=1,pp=1,mbs=2,recompute=none,sharding=none --top 1"
LINES: dict[str, tuple[str, ...]] = {
    "why": (
        *(f"{_ONE} --gpus 8 --why tp=8", f"{_ONE} --why tp=8", f"{_ONE} --gpus 8 --why pp=8"),
        *(f"{_ONE} --why mbs=3", f"{_ONE} --why cp=2,dp=1", f"{_ONE} --why gpus=64"),
        *(f"{_ONE} --memory-gib 0.0001 --why recompute=none", f"{_ONE} --why gbs=32"),
        *(f"{_ONE} --why dp=2,mbs=2,recompute=none,sharding=none", f"{_ONE} --why seq=64"),
    ),
    "answered": (
        f"{_H100} --config llama/config.json",
        f"predict --device V100 -- {_GPT} --bf16",
        f"predict --device A100 -- {_GPT} --bf16 --fp8-format hybrid",
        *(f"predict --device {name} -- {_GPT} --fp16" for name in ("GB200", "H200", "T4")),
        *(f"{_H100} -- NCCL_DEBUG=INFO {_GPT}", f"{_H100} --tp 4 --gpus 32 -- {_GPT}"),
        f"{_H100} --anyway -- bash exported.sh",
        f"doctor -- NCCL_DEBUG=INFO {_LINE}",
        f"doctor --device H20 -- {_LINE} --use-mc2",
        f"doctor --device H100 -- {_GPT} --optimizer muon",
        f"doctor --device H100 --fail-over 0.9 -- {_GPT}",
        f"doctor --gpus 8 -- {_SRUN}",
        *("plan quick --show 0", "plan quick --memory-gib 0.000001 --show 1"),
        f"plan quick --show 1 -- {_MINE}",
        *("report cpu --run-id golden", "predict cpu --run-id golden"),
        *(
            f"predict cpu -- {_GPT} --log-params-norm",
            f"predict cpu -- {_GPT} --timing-log-level=2",
        ),
        f"{_ONE} --anyway -- {_MINE} --optimizer muon",
        f"explain cpu running --anyway -- {_MINE} --optimizer muon",
        f"predict cpu --assume-no-effect my-flag -- {_MINE} --my-flag 3",
        f"predict cpu -- {_GPT} --my-flag 3",
        "plan cpu --gpus 2,7,4 --keep tp=1 --objective cost --top 1",
        "plan cpu --gpus 2,4 --keep tp=1,pp=1 --seq 64 --top 1",
    ),
    "diff": (
        *("diff cpu", "diff cpu cpu --windows 0 1", "diff cpu --windows 0 9", "diff cpu@x cpu"),
        *("diff cpu cpu --fail-over -1", "diff cpu cpu --fail-over nan"),
        *("diff cpu cpu --run-id one", "diff nodir nodir", "diff cpu inspected"),
        "diff tp2 pp2 --fail-over 0.1",
    ),
    "explain": (
        *("explain cpu tp3", "explain cpu nonsense", "explain cpu 999", "explain cpu tp0"),
        *("explain cpu running --gpus 0", "explain cpu 'tp2 zz'", "explain cpu zero7"),
        *("explain cpu ddpx2", "explain cpu ''", "explain cpu mbs3"),
        "explain cpu 'pp2 1x99999-3'",
        f"explain cpu running -- {_MINE} --optimizer muon",
        *(f"explain TP2 TP4 -- {_GPT}", f"explain --gpus 8 TP2 TP4 -- {_GPT}"),
    ),
    "doctor": (
        *("doctor --device H100", "doctor --fail-over 0", "doctor -- torchrun t.py"),
        *(f"doctor --gpus 0 -- {_GPT}", f"doctor --mtbf-hours -1 -- {_GPT}"),
        f"doctor -- {_SRUN}",
        *(f"doctor --mtbf-hours nan -- {_GPT}", f"doctor --nothing -- {_GPT}"),
    ),
    "plan": (
        *("plan cpu --keep tp=64", "plan cpu --device B20", "plan cpu --gpus 7,11"),
        "plan quick --memory-gib 0.000001 --show 1 --write go.sh",
        f"plan cpu -- {_MINE} --optimizer muon",
        *("plan quick --show 1000", "plan nodir", "plan --device H100 job.sbatch"),
        "plan --gpus 8 --config llama/config.json",
        "plan --device H100,NONSENSE --config llama/config.json",
    ),
    "predict": (
        *("predict cpu --device B20", "predict cpu --tpp 2"),
        "predict --config llama/config.json --gbs 64",
        "predict --device H100,A100 --config llama/config.json",
        "predict --device H100,NONSENSE --config llama/config.json",
        *(f"{_H100} --config t5.json", f"{_H100} --config bert.json"),
        *(f"{_H100} --config encoder.json", f"{_H100} --config adapter_config.json"),
        *(f"{_H100} --config job.sbatch", f"{_H100} job.sbatch"),
        f"{_H100} -- {_GPT} --peft-type lora",
        f"{_H100} -- {_GPT.replace('_gpt', '_mamba')} --bf16 --spec a b",
        f"{_H100} -- {_GPT} --tensor-modelparallel-size 2",
        f"{_H100} --gpus 32 --tp 3 --config llama/config.json",
        *(_H100, f"{_H100} -- {_GPT.replace('--nproc-per-node 8', '')}"),
        *(f"predict --device H99 -- {_GPT}", f"{_H100} -- {_GPT} --optimizer muon"),
        *(f"{_H100} -- NCCL_PROTO=LL {_GPT}", f"{_H100} -- env NCCL_PROTO=LL {_GPT}"),
        *(f"{_H100} -- NCCL_OF_TOMORROW=1 {_GPT}", f"{_H100} -- bash exported.sh"),
        f"predict cpu -- {_MINE} --my-flag 3",
        f"predict cpu --assume-no-effect my-flag -- {_MINE} --my-flag 3 --optimizer muon",
        *(f"{_SBATCH} -- {_GPT}", f"{_SBATCH} --tokens 1T -- {_GPT} --train-iters 5"),
        f"{_SBATCH} --tokens 1T --gpus 2 --mbs 32 --seq 8192 -- {_GPT}",
        f"{_SBATCH} --tokens 1T -- accelerate launch {_GPT[_GPT.index('pretrain') :]}",
        *(f"{_H100} --config go", f"{_H100} -- bash go.sh"),
        *(f"{_H100} --tokens=1X -- {_GPT}", f"{_H100} --price-per-gpu-hour 1 -- {_GPT}"),
    ),
    "others": (
        *("report cpu --run-id x", "predict cpu --run-id x"),
        *("report nodir", "normal nodir", "normal cpu", "status nodir"),
        *("status inspected", "report inspected", "status empty", "report empty"),
        f"import log {LOG} --out logged",
    ),
}
"""Command lines of which exit code and text alone are held; those of a verb are refused."""
