"""Parser for layout names, as plans print them and users type them."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..workload.choices import LABELLED_CHOICES, FieldValues
from ..workload.config import RunConfig
from ..workload.parallelism import Parallelism
from .axes import changed

RUNNING = "running"
_USAGE = (
    "write it as a plan does (TP4 PP2 DP2 mbs2), in short names over the running layout (tp4 pp2), "
    "or as running"
)


def named_layout(text: str, running: RunConfig, num_ranks: int = 0) -> RunConfig:
    """Return the layout named by ``text``, on ``num_ranks`` ranks (0: as running) unless it has dp.

    With degrees in capitals, as a plan prints it, choices that are not named are 1 or off.  In
    lower case it is a change of the running layout, which keeps all other choices; dp follows.
    Raises ``ConfigError`` if a word is unknown or the layout cannot run.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> gpt = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> running = RunConfig(model=gpt, parallelism=Parallelism(tp=2, dp=4),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=16))
    >>> found = [named_layout(text, running).parallelism for text in ("PP2 DP4 mbs1", "pp2")]
    >>> [(par.tp, par.pp, par.dp) for par in found]
    [(1, 2, 4), (2, 2, 2)]
    """
    words = text.replace(",", " ").split()
    if not words:
        raise ConfigError(f"no layout is named; {_USAGE}")
    if [word.lower() for word in words] == [RUNNING]:
        return running
    said = {name: values for word in words for name, values in [_said(word, running)]}
    is_whole = any(word.isupper() or word[:4] == "ZeRO" for word in words)
    ranks = num_ranks or running.parallelism.num_ranks
    values: dict[str, Any] = {}
    for one in LABELLED_CHOICES:
        values |= said.get(one.name, one.unsaid(running, values) if is_whole else {})
        if one.name == "dp":
            values |= _ranks(values, running, ranks)
    return changed(running, values | _following(values, running))


def _said(word: str, running: RunConfig) -> tuple[str, FieldValues]:
    """Return the name of the choice that a word states, and its fields."""
    small = word.lower().replace("=", "")
    for one in LABELLED_CHOICES:
        if (values := one.fields_of_word(small, running)) is not None:
            return one.name, values
    raise ConfigError(f"{word} is not part of a layout; {_USAGE}")


def _ranks(values: FieldValues, running: RunConfig, num_ranks: int) -> FieldValues:
    tp, cp, pp = (values.get(n, getattr(running.parallelism, n)) for n in ("tp", "cp", "pp"))
    if "dp" in values:
        return {"num_ranks": tp * cp * pp * values["dp"]}
    if num_ranks % (tp * cp * pp):
        raise ConfigError(
            f"{num_ranks} ranks do not split over tp {tp} x cp {cp} x pp {pp}; name dp too for "
            "another number of ranks"
        )
    return {"num_ranks": num_ranks, "dp": num_ranks // (tp * cp * pp)}


def _following(values: FieldValues, running: RunConfig) -> FieldValues:
    """Return fields that follow from the named ones."""
    par = running.parallelism
    pp, cp = values.get("pp", par.pp), values.get("cp", par.cp)
    vp = values.get("vp", 1 if pp == 1 else par.vp)
    if layers := values.get("chunk_layers"):
        Parallelism(pp=pp, vp=vp, chunk_layers=layers)
    is_same_split = (pp, vp) == (par.pp, par.vp)
    following = {"vp": vp, "microbatch_group_size": par.microbatch_group_size * is_same_split}
    if "is_sequence_parallel" not in values:
        # Megatron trains experts over tp only with sequence parallelism.
        has_experts = running.model.experts is not None
        following["is_sequence_parallel"] = par.is_sequence_parallel or has_experts
    if "sharding" not in values and cp * values["dp"] == 1:
        following["num_optimizer_instances"] = 1
    return following
