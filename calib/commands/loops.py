"""Arguments of Hugging Face's Trainer, and of loops of one's own, for another layout.

A Trainer's arguments are those of ``TrainingArguments`` (transformers 5.23).  A loop of one's own
has what names its author gave; usual names of a batch are changed, all else is told in words.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments.kept_arguments import MASK
from ..workload.config import Recompute, RunConfig, Sharding
from .words import Noted, Phrase, Word, joined, phrases, put

_BATCH = "--per-device-train-batch-size"
_STEPS = "--gradient-accumulation-steps"
_OFTEN_SAID = frozenset({_BATCH, _STEPS, "--output-dir", "--num-train-epochs", "--max-steps"})
"""By one of these a script shows that it reads ``TrainingArguments`` from its command line."""
_SHARDED = "full_shard auto_wrap"
_MICRO = ("micro-batch-size", "per-device-batch-size", "local-batch-size", "batch-size")
_ACCUMULATED = (
    *("gradient-accumulation-steps", "accumulate-grad-batches", "grad-accum-steps"),
    *("grad-accumulation-steps", "accumulation-steps", "grad-accum"),
)
"""Usual names of a rank's batch and of the passes of a step, as the end of an option or a path."""


def trainer_program(argv: Sequence[Word], running: RunConfig, config: RunConfig) -> Noted:
    """A Trainer's words with batch, accumulation, checkpointing and FSDP as the layout has them."""
    found = list(phrases(argv))
    named = {phrase.name for phrase in found}
    wanted = _trainer_values(running, config)
    reads_any = bool(named & _OFTEN_SAID)
    in_code = {n: v for n, v in wanted.items() if not reads_any or n in running.absent}
    notes = []
    if in_code:
        values = ", ".join(f"{n[2:].replace('-', '_')}={v}" for n, v in in_code.items())
        notes.append(f"set in TrainingArguments, in the code: {values}")
    for name, value in wanted.items():
        if name in in_code:
            continue
        if value:
            found = put(found, name, Word(text=value), "_")
        else:
            found = [phrase for phrase in found if phrase.name != name]
    if config.parallelism.num_optimizer_instances > 1:
        notes.append("hybrid sharding needs version 1 and HYBRID_SHARD in --fsdp_config")
    return Noted(words=joined(found), notes=tuple(notes))


def loop_program(argv: Sequence[Word], running: RunConfig, config: RunConfig) -> Noted:
    """A loop's own words with its batch changed where an option says it, and the rest in words."""
    found, notes = list(phrases(argv)), list(_told(running, config))
    sizes = {
        _MICRO: ("micro-batch size", running.batch.micro_batch_size, config.batch.micro_batch_size),
        _ACCUMULATED: (
            "micro-batches of a step",
            running.num_microbatches,
            config.num_microbatches,
        ),
    }
    for names, (what, now, then) in sizes.items():
        if now == then:
            continue
        place = _place(found, names, now)
        if place is None:
            notes.insert(
                0, f"{what} {then} in place of {now}: no option says it; set it in the code"
            )
        else:
            found[place] = found[place].having(Word(text=str(then)))
    return Noted(words=joined(found), notes=tuple(notes))


def _trainer_values(running: RunConfig, config: RunConfig) -> dict[str, str]:
    """Options that differ; empty text takes one away."""
    found: dict[str, str] = {}
    if running.batch.micro_batch_size != config.batch.micro_batch_size:
        found[_BATCH] = str(config.batch.micro_batch_size)
    if running.num_microbatches != config.num_microbatches:
        found[_STEPS] = str(config.num_microbatches)
    if running.recompute is not config.recompute:
        found["--gradient-checkpointing"] = str(config.recompute is not Recompute.NONE)
    if _sharding(running) is not _sharding(config):
        found["--fsdp"] = "" if _sharding(config) is Sharding.NONE else _SHARDED
    return found


def _told(running: RunConfig, config: RunConfig) -> list[str]:
    """What no option of a loop says, as its code would."""
    notes = []
    sharding, copies = _sharding(config), config.parallelism.num_optimizer_instances
    if (_sharding(running), running.parallelism.num_optimizer_instances) != (sharding, copies):
        if sharding is Sharding.NONE:
            notes.append("wrap the model in DistributedDataParallel in place of FSDP")
        elif copies > 1:
            each = config.parallelism.dp // copies
            notes.append(f"shard over a mesh of ({copies}, {each}): HYBRID_SHARD, or fully_shard")
        else:
            notes.append("shard the model over all ranks: fully_shard, or FSDP with FULL_SHARD")
    if running.recompute is not config.recompute:
        is_on = config.recompute is not Recompute.NONE
        notes.append(f"turn activation checkpointing {'on' if is_on else 'off'} in the code")
    for name in ("tp", "pp", "cp", "ep"):
        now, then = getattr(running.parallelism, name), getattr(config.parallelism, name)
        if now != then:
            notes.append(f"{name} {then} in place of {now} in the code")
    return notes


def _sharding(config: RunConfig) -> Sharding:
    par = config.parallelism
    return par.sharded if par.sharded is Sharding.WEIGHTS else Sharding.NONE


def _place(found: Sequence[Phrase], names: Sequence[str], now: int) -> int | None:
    """The option that says this value, or hides one under such a name."""
    for name in names:
        for place, phrase in enumerate(found):
            own = phrase.name.lstrip("-").replace("_", "-").rpartition(".")[2]
            if own == name and phrase.value in (str(now), MASK):
                return place
    return None
