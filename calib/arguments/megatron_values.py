"""``RunConfig`` as values of Megatron's arguments: the inverse of ``from_namespace``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..workload.argument_fields import written_fields
from ..workload.argument_values import Values, option_of
from ..workload.config import RunConfig
from ._megatron_model import OF_MODEL
from ._megatron_settings import OF_RUN, OF_STATE, OF_WORK, SHARDING, is_fsdp2
from .megatron_options import GROUPS, OPTIONS, STATED, SWITCHES
from .option_words import option_words


def layout_values(config: RunConfig) -> Values:
    """Return a layout's values, by name in the namespace; defaults are omitted, except sizes."""
    declared = written_fields(config.parallelism) | written_fields(config.batch)
    if config.cadence.full_batch_size:
        declared["global_batch_size"] = config.cadence.full_batch_size
    values = {name: value for name, value in declared.items() if name not in SWITCHES}
    for setting in OF_WORK:
        values |= setting.write(config)
    values |= declared
    for setting in OF_STATE:
        values |= setting.write(config)
    values |= written_fields(config, lambda one: one.is_of_layout)
    # The options of every layout come first.
    void = _without_effect(config)
    names = sorted(values, key=lambda name: name not in STATED)
    return {name: values[name] for name in names if name not in void}


def _without_effect(config: RunConfig) -> frozenset[str]:
    """Return the arguments that Megatron ignores in the layout, or refuses."""
    par, names = config.parallelism, set[str]()
    if config.cadence.step_batch_size_schedule:
        names.add("global_batch_size")
    if par.vp == 1:
        names.add("overlap_p2p_comm")
    if par.vp == 1 or not par.overlaps_param_gather:
        names.add("overlap_param_gather_with_optimizer_step")
    if par.pp == 1:
        names |= {"defer_embedding_wgrad_compute", "wgrad_deferral_limit"}
    if not config.optimizer_offload_frac:
        names |= {"optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"}
    if is_fsdp2(config):
        names.update(SHARDING.beside)
    return frozenset(names)


def model_values(config: RunConfig) -> Values:
    """Return values of model, precision, attention and cadence, by name in the namespace."""
    return {
        **OF_MODEL.write(config),
        **OF_RUN.write(config),
        **written_fields(config.cadence),
        **written_fields(config, lambda one: not one.is_of_layout),
    }


def as_options(values: Values) -> Iterator[tuple[str, list[str]]]:
    """Yield each value as its option and the words after it; a switch has none."""
    for target, value in values.items():
        name, constant = OPTIONS.get(target, (target, None))
        if constant is not None or value is True:
            yield option_of(name), []
        else:
            yield (
                option_of(name),
                [str(v) for v in value] if isinstance(value, list) else [str(value)],
            )


def as_given(config: RunConfig, values: Values) -> RunConfig:
    """Return the config with those given options that ours would spell differently."""
    ours, words = layout_values(config), []
    for group in GROUPS:
        canonical = {name: value for name, value in ours.items() if name in group}
        stated = {n: v for n, v in values.items() if n in group and _has_option(n, v)}
        if stated and dict(as_options(canonical)) != (options := dict(as_options(stated))):
            words += [w for option, rest in options.items() for w in option_words(option, rest)]
    return replace(config, given=tuple(words))


def _has_option(target: str, value: object) -> bool:
    """Return False for values without an option: None, a default switch, an object of a library."""
    constant = OPTIONS.get(target, (target, None))[1]
    if isinstance(value, bool) or constant is not None or target in SWITCHES:
        return value is (constant is not False)
    return isinstance(value, str | int | float | list)
