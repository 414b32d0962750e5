"""Train a small Llama with the ``Trainer`` of transformers; Forerun needs no change to it.

    torchrun --standalone --nproc-per-node 2 hf_trainer.py --calibrate

The flag alone detects the ``Trainer``, its number of steps and the shape of a known decoder, so
that the end, other layouts and the decision are answered.  ``--max-steps 500`` changes the length.
Needs Forerun's extra ``analysis``, transformers and accelerate.
"""

from __future__ import annotations

import argparse

# Before the arguments are parsed: this import removes --calibrate and its options from them.
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEQ_LENGTH, VOCAB_SIZE, NUM_ROWS = 64, 256, 512


def main() -> None:
    """Train to the last step, or until an advised and requested stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--output-dir", default="hf-out")
    args = parser.parse_args()
    set_seed(1)
    has_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        # A known end; with num_train_epochs it is derived from the data's length.
        max_steps=args.max_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        logging_steps=20,
        # Saves are excluded from the step time, but included in the run's end.
        save_steps=args.max_steps // 2,
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    # Without --calibrate in the launch: callbacks=[forerun.hugging_face_callback(steps=20)].
    Trainer(model=small_llama(), args=arguments, train_dataset=random_rows()).train()


def small_llama() -> LlamaForCausalLM:
    """Return a decoder of four layers."""
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=SEQ_LENGTH,
        )
    )


def random_rows() -> list[dict[str, torch.Tensor]]:
    """Return random tokens in place of a data set, in rows of equal length as in packed
    pre-training."""
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_ROWS, SEQ_LENGTH))
    return [{"input_ids": row, "labels": row} for row in tokens]


if __name__ == "__main__":
    main()
