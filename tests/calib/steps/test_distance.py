"""How far base times of others may be off: by generation, width and kernel, and by what is open."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_shape import of_width

from forerun.calib.fit.rate_priors import RatePrior, rates_prior
from forerun.calib.steps._layouts import layouts_of
from forerun.calib.steps._priced_items import SCALE
from forerun.calib.steps._scales import RELEASE_SIGMA_LOG, UNMODELLED, scales
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.estimate import StepEstimate
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import ERROR_INFLATION, fit_steps
from forerun.calib.steps.step_tables import machine_times
from forerun.calib.workload.config import (
    Batch,
    Parallelism,
    Precision,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind, Phase

H100 = "NVIDIA H100 80GB HBM3"


def config(device: str = H100, seq: int = 4096, **changed: object) -> RunConfig:
    """A dense model in bf16 on two nodes."""
    plain = RunConfig(
        model=replace(of_width(4096, num_layers=32, vocab_size=51200), seq_length=seq),
        parallelism=Parallelism(tp=2, dp=8, ranks_per_node=8),
        batch=Batch(micro_batch_size=1, global_batch_size=64),
        precision=Precision.BF16,
        device=device,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def deviations(one: RunConfig, without: tuple[str, ...] = ()) -> dict[str, float]:
    """Return log deviations of the constants of a machine of which nothing is known."""
    known = machine_times(one, without=without).conditions
    return {scale.name: scale.log_sigma for scale in scales(known)}


def products(device: str, kind: OperatorKind = OperatorKind.LINEAR) -> RatePrior:
    """Rates of products in 16 bits."""
    rate_prior = rates_prior(device, kind, Phase.FORWARD, 2)
    assert rate_prior is not None
    return rate_prior


@pytest.mark.parametrize("device", ["H100", "B200", "V100"])
def test_a_level_is_less_sure_without_the_tables_of_its_generation(device: str) -> None:
    tables = tuple({name.split()[-1] for name in products(device).sources})
    assert deviations(config(device), tables)["compute"] > deviations(config(device))["compute"]
    assert deviations(config("A100"), ("ops_vidur_mlp",)) == deviations(config("A100"))


def test_attention_of_an_unstated_kernel_is_slower_and_open_on_newer_devices_alone() -> None:
    """FlashAttention-2 reaches 35 % of an H100 (Shah et al. 2024), its third version 75 %."""
    long, engine = config(seq=65536), {"framework": "megatron-core 0.16.1"}

    def estimate_of(one: RunConfig) -> StepEstimate:
        return fit_steps(machine_times(one)).estimate(one)

    stated, unstated = estimate_of(replace(long, **engine)), estimate_of(long)
    assert 1.2 < unstated.time_s / stated.time_s < 0.75 / 0.35
    assert unstated.sigma_log > 1.3 * stated.sigma_log
    for same in ({"device": "A100"}, {"precision": Precision.FP32}):
        one, other = (estimate_of(replace(c, **same)) for c in (long, replace(long, **engine)))
        assert one.time_s == other.time_s and one.sigma_log == other.sigma_log


def test_a_stated_kernel_of_the_generation_before_is_slower_and_less_open() -> None:
    """nanotron and llm-foundry call flash-attn, which is FlashAttention-2; PyTorch does up to 2.9,
    and cuDNN from 2.10 on (``check_prefer_cudnn_attention`` of its ``sdp_utils.cpp``)."""
    long = config(seq=65536)
    unstated, stated = (
        fit_steps(machine_times(one)).estimate(one)
        for one in (long, replace(long, framework="nanotron"))
    )
    assert unstated.time_s < stated.time_s < 1.5 * unstated.time_s
    assert stated.sigma_log < 0.8 * unstated.sigma_log


def test_what_hid_behind_another_stage_comes_out_where_steps_say_so() -> None:
    """An odd vocabulary costs its head four times the time, behind stages of more layers by the
    priors: no slope at their centres leads there."""

    def staged(pp: int, layers: tuple[int, ...], micro: int = 2) -> RunConfig:
        model = of_width(2048, num_layers=24, vocab_size=50257)
        par = Parallelism(pp=pp, chunk_layers=layers, ranks_per_node=8)
        batch = Batch(micro_batch_size=micro, global_batch_size=64 * micro)
        return config(model=replace(model, seq_length=4096), parallelism=par, batch=batch)

    known = [staged(4, (7, 7, 6, 4)), staged(2, (14, 10)), staged(4, (7, 7, 6, 4), micro=4)]
    unseen = staged(8, (4, 3, 3, 4, 3, 3, 4, 0))
    base = machine_times(unseen)
    layouts = layouts_of([*known, unseen], base)
    theta = np.zeros((len(layouts.constants), 1))
    theta[layouts.constants.index((SCALE, "misaligned"))] = 0.9
    *steps_s, unseen_s = np.exp(layouts.log_time(theta))[:, 0].tolist()
    known_steps = [KnownStep(config=c, time_s=s) for c, s in zip(known, steps_s, strict=True)]
    assert fit_steps(base).predict([unseen]).time_s[0] < 0.7 * unseen_s
    assert fit_steps(base, known_steps).predict([unseen]).time_s[0] == pytest.approx(
        unseen_s, rel=0.1
    )


def test_steps_that_wait_for_the_host_scatter_unless_they_were_measured() -> None:
    def of(width: int) -> RunConfig:
        shape = of_width(width, num_layers=32, vocab_size=51200)
        return config(seq=2048, model=replace(shape, seq_length=2048))

    bound, free = of(512), of(8192)
    base = machine_times(bound)
    estimates = fit_steps(base).estimates([bound, free])
    assert estimates[0].unshared_sigma_log > 1.5 * estimates[1].unshared_sigma_log
    fitted = fit_steps(base, [KnownStep(config=bound, time_s=estimates[0].time_s)])
    other = replace(bound, batch=Batch(micro_batch_size=2, global_batch_size=64))
    measured, blind = fitted.estimates([bound, other])
    assert measured.unshared_sigma_log < 0.1 * blind.unshared_sigma_log


def test_odd_vocabularies_cost_more_where_only_older_instructions_take_them() -> None:
    """Hopper's ``mma.sync`` reaches 62.9 % of its peak (Luo et al. 2024), A100's all of it."""

    def centre(device: str) -> float:
        result = {scale.name: scale for scale in scales(machine_times(config(device)).conditions)}
        return result["misaligned"].log_center

    assert centre(H100) - centre("A100") == pytest.approx(-math.log(0.629))
    assert centre("B200") == centre(H100) and centre("V100") == centre("A100")


def test_one_set_of_base_times_answers_for_layouts_of_either_kernel() -> None:
    """A device that nothing was measured on is asked for any layout, whatever it was opened by."""
    long = config(seq=65536)
    stated = replace(long, framework="megatron-core 0.16.1")
    both = fit_steps(machine_times(stated))
    for one in (long, stated):
        alone = fit_steps(machine_times(one)).predict([one])
        assert both.predict([one]).high_s[0] == alone.high_s[0]


def test_products_in_fp32_may_be_eight_times_as_fast_until_a_step_says_which() -> None:
    """With TF32, which no launch states; V100 has none."""
    wide = config("A100", precision=Precision.FP32)
    steps = fit_steps(machine_times(wide))
    ends = steps.predict([wide])
    assert ends.high_s[0] > 4 * ends.low_s[0]
    fast = KnownStep(config=wide, time_s=float(ends.time_s[0]) / 3)
    other = replace(wide, batch=Batch(micro_batch_size=2, global_batch_size=64))
    informed = fit_steps(machine_times(wide), [fast]).predict([other])
    assert informed.high_s[0] < 2 * informed.low_s[0]
    assert informed.time_s[0] == pytest.approx(fast.time_s, rel=0.15)
    for sure in (config("A100"), replace(wide, device="V100")):
        ends = fit_steps(machine_times(sure)).predict([sure])
        assert ends.high_s[0] < 3 * ends.low_s[0]


def test_grouped_products_are_as_much_slower_than_plain_ones_as_where_both_were_timed() -> None:
    """B200 alone has a table of them: on H100 its share of the data sheet was half of the truth."""
    apart = [
        products(device, OperatorKind.GROUPED_LINEAR).flop_log_factor
        - products(device).flop_log_factor
        for device in ("b200", "h100", "a100")
    ]
    assert max(apart) - min(apart) < 0.01
    steps = [products(d, OperatorKind.GROUPED_LINEAR).flop_sigma_log for d in ("b200", "h100")]
    assert steps[0] < steps[1]


@pytest.mark.slow
@given(names=st.sets(st.text(min_size=1, max_size=5), min_size=1, max_size=3))
def test_settings_that_are_not_modelled_widen_until_a_step_that_has_them_is_known(
    names: set[str],
) -> None:
    plain = config()
    open_one = replace(plain, unmodelled=tuple(names))
    base = prior_times(H100, is_attention_fused=True)
    first, second = fit_steps(base).estimates([plain, open_one])
    extra_sigma_log = math.sqrt(second.sigma_log**2 - first.sigma_log**2)
    assert second.time_s == pytest.approx(first.time_s)
    assert extra_sigma_log == pytest.approx(ERROR_INFLATION * RELEASE_SIGMA_LOG[UNMODELLED])
    known = fit_steps(base, [KnownStep(config=open_one, time_s=2 * first.time_s)])
    alike = replace(open_one, batch=Batch(micro_batch_size=2, global_batch_size=64))
    other = replace(alike, unmodelled=())
    same, apart = known.estimates([alike, other])
    assert same.sigma_log < apart.sigma_log and same.time_s > apart.time_s
