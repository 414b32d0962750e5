#!/bin/bash
# Megatron-LM's own pretrain_gpt.py on one node, calibrated: edit the lines marked <-, then
#   MEGATRON_LM=/path/to/Megatron-LM bash megatron_one_node.sh
#
# Megatron-LM is not edited and Forerun is not imported: --calibrate is all. Forerun has to be in
# the environment that trains: pip install '/path/to/forerun[analysis]'; Megatron's script also
# imports six and regex, which megatron-core does not install: pip install six regex
# Arguments of this script are passed to Megatron, where the last value of an option wins:
#   bash megatron_one_node.sh --train-iters 2000 --lr 2e-4 --calibrate-deadline=2027-01-31T08:00:00Z
# To see it run without a GPU, with a small model on two processes:
#   CPU=1 MEGATRON_LM=/path/to/Megatron-LM bash megatron_one_node.sh --train-iters 40

set -eu

: "${MEGATRON_LM:?no Megatron-LM is named; say MEGATRON_LM=/path/to/Megatron-LM}"
# Checkpoints and answers; the next launch in it knows what this one measured.
run=${RUN:-$PWD/gpt-run} # <-
gpus=${GPUS:-8}          # <-

# Without data of your own, to see it run: --mock-data and a tokenizer that only counts.
data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 32000)                          # <-
model=(--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048)                                                           # <-
layout=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)                 # <-
training=(--micro-batch-size 2 --global-batch-size 256 --train-iters 20000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200
    --eval-interval 1000 --eval-iters 10 --log-interval 10)                                   # <-
# --save also for --calibrate-on-advice=stop: Megatron writes its checkpoint before it ends.
checkpoints=(--save "$run/checkpoints" --load "$run/checkpoints" --save-interval 500)

# Megatron asks for it under tensor parallelism, on GPUs before Blackwell.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

on_cpu=()
if [ "${CPU:-0}" = 1 ]; then
    gpus=2
    on_cpu=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
        --max-position-embeddings 64 --vocab-size 4200 --global-batch-size 8 --eval-iters 1
        --lr-warmup-iters 2 --calibrate-device=cpu --distributed-backend gloo
        --transformer-impl local --use-cpu-initialization --no-persist-layer-norm
        --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
        --no-bias-dropout-fusion --ckpt-format torch --num-workers 0)
fi

cd "$MEGATRON_LM" # its packages are found from here
exec torchrun --standalone --nproc-per-node "$gpus" pretrain_gpt.py \
    "${data[@]}" "${model[@]}" "${layout[@]}" "${training[@]}" "${checkpoints[@]}" \
    --calibrate --calibrate-dir="$run/forerun-out" "${on_cpu[@]}" "$@"
