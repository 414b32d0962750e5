"""One small training on CPU ranks, ``coverage_loop.py LOOP MODEL DIRECTORY``, under torchrun.

LOOP is ``fsdp2`` (each layer sharded by ``fully_shard``, attached with ``forerun.attach``) or
``trainer`` (that of transformers, with ``--calibrate``).  MODEL is a tiny model of transformers, as
in ``MODELS``, or ``plain``, which has no configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

SEQ, MICRO_BATCH, STEPS, WINDOW, VOCAB = 64, 2, 16, 8, 512
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
}


def llama(attention: str) -> nn.Module:
    """Return a dense decoder, with one of the attention functions of transformers."""
    config = transformers.LlamaConfig(**_SIZES, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Return a dense decoder whose queries, keys and values are one product."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=VOCAB, n_positions=SEQ)
    )


def qwen3_moe() -> nn.Module:
    """Return a decoder whose layers have eight experts, two for each token."""
    config = transformers.Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
    )
    return transformers.Qwen3MoeForCausalLM(config)


class Plain(nn.Module):
    """Next-token prediction by two gated layers, without any configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 128), nn.Linear(128, VOCAB)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the loss, as models of transformers do."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


MODELS = {
    "llama-eager": lambda: llama("eager"),
    "llama-sdpa": lambda: llama("sdpa"),
    "llama-flex": lambda: llama("flex_attention"),
    "llama-wrapped": lambda: llama("sdpa"),
    "llama-recompute": lambda: llama("sdpa"),
    "llama-compiled": lambda: llama("sdpa"),
    "gpt2": gpt2,
    "qwen3-moe": qwen3_moe,
    "plain": Plain,
}


def prepared(name: str) -> nn.Module:
    """Return the model, with its layers in checkpoints of torch or of transformers, or compiled."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    if name == "llama-recompute":
        model.gradient_checkpointing_enable()
    layers = getattr(model, "model", model)
    for number, layer in enumerate(getattr(layers, "layers", ())):
        if name == "llama-wrapped":
            layers.layers[number] = checkpoint_wrapper(layer, early_stop=False)
        elif name == "llama-compiled":
            layer.compile(backend="aot_eager")
    return model


def fsdp2(name: str, directory: Path) -> None:
    """Train in a plain loop over sharded layers."""
    import forerun

    dist.init_process_group("gloo")
    model: Any = prepared(name)
    inner = getattr(model, "model", getattr(model, "transformer", model))
    for layer in getattr(inner, "layers", getattr(inner, "h", ())):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with forerun.attach(
        model, optimizer, train_iters=STEPS, directory=directory, steps=WINDOW
    ) as run:
        for _ in range(STEPS):
            tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ), generator=generator)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    dist.destroy_process_group()


def trainer(name: str, directory: Path) -> None:
    """Train with the Trainer of transformers, over DDP."""
    training_arguments = transformers.TrainingArguments(
        output_dir=str(directory / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        gradient_checkpointing=name == "llama-recompute",
        ddp_find_unused_parameters=False,
    )
    tokens = torch.randint(0, VOCAB, (STEPS * 8, SEQ), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    transformers.Trainer(prepared(name), training_arguments, None, rows).train()


if __name__ == "__main__":
    {"fsdp2": fsdp2, "trainer": trainer}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
