"""Plain training loops for ``device.py``: ``device_loops.py KIND``, under torchrun.

FSDP2 shards a small Llama, in one group or in two replicas; the unsharded Llama is the baseline.
The ring attends over a sequence shared by two ranks, with the call order of TransformerEngine's
context parallelism: waits and sends on two streams in turn.  None of them contains a line for
Forerun.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from device_timeline import Timeline, timeline
from torch import nn

STEPS, BATCH, SEQ, VOCAB = 24, 2, 64, 256
HIDDEN, HEADS, FFN, LAYERS = 64, 4, 256, 3
MESHES: dict[str, tuple[int, ...]] = {"llama": (), "fsdp2": (4,), "hsdp": (2, 2)}
RING_HEADS = 1
"""Few scores, so that the transfers of the ring take as long as the computation that hides them."""
Pair = tuple[torch.Tensor, torch.Tensor]


def llama(mesh_shape: tuple[int, ...]) -> nn.Module:
    """Return a small decoder; given a mesh, its layers are units of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=128,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    if not mesh_shape:
        return model
    names = ("copy", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cuda", mesh_shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Ring(torch.autograd.Function):
    """Causal attention of two ranks over own keys, then over the other rank's, passed in a ring.

    As with a causal mask, the work for own keys takes longer than for the other rank's.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, kv: torch.Tensor, group: Any) -> torch.Tensor:
        """Attend over (batch, heads, seq, channels); keys and values are stacked."""
        size = dist.get_world_size(group)
        streams = [torch.cuda.current_stream(), _side()]
        buffers, parts = [kv.contiguous()], []
        requests: list[list[Any]] = [[], []]
        _side().wait_stream(torch.cuda.current_stream())
        for i in range(size):
            with torch.cuda.stream(streams[i % 2]):
                for request in requests[(i + 1) % 2]:
                    request.wait()
                if i < size - 1:
                    buffers.append(torch.empty_like(kv))
                    requests[i % 2] = _pass_on(buffers[i], buffers[i + 1], group)
                parts.append(_attend(q, buffers[i], is_causal=i == 0))
        torch.cuda.current_stream().wait_stream(streams[1])
        out, logsum = _joined(parts)
        ctx.save_for_backward(q, out, logsum, *buffers)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Send gradients of remote keys back on the step's stream, as TransformerEngine does."""
        q, out, logsum, local_kv, other = ctx.saved_tensors
        delta = (gradients[0] * out).sum(-1, keepdim=True)
        dq, d_other = _gradients(q, other, gradients[0], logsum, delta, is_causal=False)
        d_local = torch.empty_like(d_other)
        requests = _pass_on(d_other, d_local, ctx.group)
        dq_local, d_kv = _gradients(q, local_kv, gradients[0], logsum, delta, is_causal=True)
        for request in requests:
            request.wait()
        return dq + dq_local, d_kv + d_local, None


_streams: list[Any] = []


def _side() -> Any:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def _pass_on(sent: torch.Tensor, received: torch.Tensor, group: Any) -> list[Any]:
    """Send to the next rank of the ring, receive from the previous; odd ranks receive first."""
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    after, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    calls: list[Callable[[], Any]] = [
        lambda: dist.isend(sent, after, group),
        lambda: dist.irecv(received, before, group),
    ]
    return [call() for call in (calls if rank % 2 == 0 else calls[::-1])]


def _scores(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    scores = q @ kv[0].transpose(-1, -2) / q.shape[-1] ** 0.5
    if not is_causal:
        return scores
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -1e9)


def _attend(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> Pair:
    scores = _scores(q, kv, is_causal=is_causal)
    logsum = scores.logsumexp(-1, keepdim=True)
    return (scores - logsum).exp() @ kv[1], logsum


def _joined(parts: list[Pair]) -> Pair:
    logsum = torch.stack([one for _, one in parts]).logsumexp(0)
    return sum(out * (one - logsum).exp() for out, one in parts), logsum  # type: ignore[return-value]


def _gradients(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    logsum: torch.Tensor,
    delta: torch.Tensor,
    *,
    is_causal: bool,
) -> Pair:
    scale = q.shape[-1] ** -0.5
    weights = (_scores(q, kv, is_causal=is_causal) - logsum).exp()
    d_scores = weights * (out @ kv[1].transpose(-1, -2) - delta) * scale
    d_kv = torch.stack([d_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ out])
    return d_scores @ kv[0], d_kv


class RingAttention(nn.Module):
    """Ring attention as core attention."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Return attention of (batch, heads, seq, channels)."""
        return Ring.apply(q, kv, self._group)


class SelfAttention(nn.Module):
    """Self-attention, named as in Megatron."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.core_attention = RingAttention(group)
        self.linear_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return attention of (seq, batch, hidden)."""
        seq, batch, _ = hidden.shape
        qkv = self.linear_qkv(hidden).view(seq, batch, 3, RING_HEADS, HIDDEN // RING_HEADS)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)
        out = self.core_attention(q, torch.stack([k, v]))
        return self.linear_proj(out.permute(2, 0, 1, 3).reshape(seq, batch, HIDDEN))


class MLP(nn.Module):
    """MLP, named as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, FFN)
        self.linear_fc2 = nn.Linear(FFN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of two products and the activation between them."""
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(hidden)))


class TransformerLayer(nn.Module):
    """Transformer layer, named as in Megatron."""

    def __init__(self, number: int, group: Any) -> None:
        super().__init__()
        self.layer_number = number
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = SelfAttention(group)
        self.pre_mlp_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of a pre-norm layer."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))


class RingModel(nn.Module):
    """A decoder with a shared sequence; its gradients are summed after the backward pass."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(TransformerLayer(n + 1, group) for n in range(LAYERS))
        self.final_layernorm = nn.LayerNorm(HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of (batch, seq)."""
        hidden = self.embedding(input_ids).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        scores = self.output_layer(self.final_layernorm(hidden)).transpose(0, 1)
        return nn.functional.cross_entropy(scores.reshape(-1, VOCAB), labels.reshape(-1))


def _summed(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def train(kind: str, recorder: Timeline) -> None:
    """Train enough steps for one window."""
    torch.manual_seed(0)
    is_ring = kind == "ring-cp2"
    if is_ring:
        group = dist.new_group(group_desc="CONTEXT_PARALLEL_GROUP")
        model: nn.Module = RingModel(group)
    else:
        model = llama(MESHES[kind])
    recorder.name([model])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(STEPS):
        recorder.begin_step(number)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator).to("cuda")
        result = model(input_ids=tokens, labels=tokens)
        loss = result if is_ring else result.loss
        loss.backward()
        if is_ring:
            _summed(model)
        optimizer.step()
        optimizer.zero_grad()
        recorder.end_step()
        recorder.note(number, [loss.item()])


def main() -> None:
    """Run one process of a launch over the timeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=(*MESHES, "ring-cp2"))
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    recorder = timeline()
    if recorder is None:
        raise SystemExit("no timeline: start it with benchmarks/device.py")
    train(args.kind, recorder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
