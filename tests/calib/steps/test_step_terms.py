"""A step as a sum of terms: exact, errors that add up, closed forms where there are any."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import LAYOUTS, steps_of

from forerun.calib.fit.estimates import Source
from forerun.calib.layers.stage_work import collective_uses, stage_operators
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.estimate import StepTerms
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import ERROR_INFLATION, FittedSteps, fit_steps
from forerun.calib.timeline.items import Part
from forerun.calib.timeline.terms import Term, term_of, term_of_role
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.operators import OperatorKind, Phase

Layout = Callable[..., RunConfig]
REL = 1e-9
WORK = (Term.ATTENTION, Term.MLP, Term.ROUTING, Term.NORM, Term.HEAD, Term.LAUNCHES)
SAME = {
    (Part.FORWARD, Part.BACKWARD, Part.RECOMPUTE): (*WORK, Term.RECOMPUTE),
    (Part.HOST,): (Term.HOST, Term.OFFLOAD),
    **{(part,): (Term(part.value),) for part in (Part.TP, Part.CP, Part.EP, Part.PP, Part.DP)},
    (Part.BUBBLE,): (Term.BUBBLE,),
    (Part.OPTIMIZER,): (Term.OPTIMIZER,),
}


def only(steps: FittedSteps, config: RunConfig) -> StepTerms:
    (terms,) = steps.by_term([config])
    return terms


def error_sums(terms: StepTerms) -> dict[str, float]:
    out: dict[str, float] = {}
    for errors in terms.error_s.values():
        for name, error in errors.items():
            out[name] = out.get(name, 0.0) + error
    return out


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=LAYOUTS, is_measured=st.booleans())
def test_terms_add_up_to_the_step_and_their_errors_to_its_error(
    layout: Layout, planted: Callable[..., Any], chosen: dict[str, Any], is_measured: bool
) -> None:
    measured = (layout(device=chosen["device"]), 0.5) if is_measured else ()
    terms = only(steps_of(planted(), *measured), layout(**chosen))
    step = terms.estimate
    assert sum(terms.terms_s.values()) == pytest.approx(step.time_s, rel=REL)
    assert (
        min(
            time_s for t, time_s in terms.terms_s.items() if t not in (Term.NODES, Term.UNEXPLAINED)
        )
        >= 0
    )
    of_step = {name: step.time_s * error for name, error in step.error_log.items()}
    sums = error_sums(terms)
    assert sums.keys() >= of_step.keys()
    for name, error in sums.items():
        assert error == pytest.approx(of_step.get(name, 0.0), abs=1e-9 * step.time_s)
    for term, shares in terms.source_frac.items():
        if terms.terms_s[term] > 0 and term is not Term.LAUNCHES:
            assert sum(shares.values()) == pytest.approx(1.0), term


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=LAYOUTS)
def test_terms_are_the_parts_with_work_told_apart(
    layout: Layout, planted: Callable[..., Any], chosen: dict[str, Any]
) -> None:
    """Parts hold what is beside the terms, each in its share."""
    result = only(steps_of(planted()), layout(**chosen))
    plain_s = sum(
        t for term, t in result.terms_s.items() if term not in (Term.NODES, Term.UNEXPLAINED)
    )
    scale = result.estimate.time_s / plain_s
    for parts, terms in SAME.items():
        part_s = sum(result.estimate.parts_s[part] for part in parts)
        assert scale * sum(result.terms_s[t] for t in terms) == pytest.approx(
            part_s, rel=1e-9, abs=1e-12
        )


def test_work_is_that_of_its_operators_summed_by_hand(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config, estimator = layout(tp=2, recompute=Recompute.SELECTIVE), planted()
    terms = only(steps_of(estimator), config)
    work = stage_operators(config, 0)
    sums = dict.fromkeys(Term, 0.0)
    for operator, count in (*work.forward, *work.backward, *work.recompute):
        sums[term_of(operator.kind, operator.phase)] += count * estimator.operator_s(operator)
    for use in collective_uses(config, stage=0):
        if use.placement.is_per_microbatch:
            sums[Term.TP] += use.count * estimator.collective_s(use.call)
    for term in (*WORK, Term.RECOMPUTE):
        expected = config.num_microbatches * sums[term]
        assert terms.terms_s[term] == pytest.approx(expected, rel=REL), term
    assert terms.terms_s[Term.ATTENTION] > 0 < terms.terms_s[Term.RECOMPUTE]


@pytest.mark.parametrize(("pp", "samples"), [(2, 8), (4, 16), (4, 64)])
def test_the_bubble_follows_its_closed_form(
    layout: Layout, planted: Callable[..., Any], pp: int, samples: int
) -> None:
    """(pp - 1) / m of the work where stages are even and messages free (Narayanan et al. 2021)."""
    edges = (OperatorKind.EMBEDDING, OperatorKind.LOGITS, OperatorKind.LOSS, OperatorKind.NORM)
    after = (OperatorKind.OPTIMIZER, OperatorKind.HOST_STEP)
    free = dict.fromkeys((*edges, *after), 0.0)
    estimator = planted(kinds=free, latency_s=0.0, bytes_per_s=math.inf)
    config = layout(pp=pp, samples=samples)
    result = only(steps_of(estimator), config).terms_s
    work_s = sum(result[term] for term in (*WORK, Term.HOST))
    expected = (pp - 1) / config.num_microbatches
    assert result[Term.BUBBLE] / work_s == pytest.approx(expected, rel=1e-6)
    assert result[Term.PP] == pytest.approx(0.0, abs=1e-9)


def test_an_error_of_transfers_is_in_their_term_alone(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """On a host nothing hides: a tenth more of each is a tenth more of the term."""
    terms = only(steps_of(planted(transfer_sigma_log=0.1)), layout(tp=2))
    moved = {term: errors.get("family tp", 0.0) for term, errors in terms.error_s.items()}
    expected = 0.1 * ERROR_INFLATION * terms.terms_s[Term.TP]
    assert moved.pop(Term.TP) == pytest.approx(expected, rel=1e-3)
    # The rest is second-order in the slope.
    assert max(map(abs, moved.values())) < 1e-3 * expected


def test_the_stated_errors_of_terms_are_what_simulated_errors_give(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Monte Carlo over shared errors of all operators and of all transfers, on a pipeline."""
    config = layout(tp=2, pp=4)
    terms = only(steps_of(planted()), config)
    random = np.random.default_rng(4)
    drawn: dict[Term, list[float]] = {term: [] for term in Term}
    for _ in range(200):
        work, transfers = np.exp((0.05, 0.1) * random.standard_normal(2))
        noisy = planted(
            launch_s=1e-5 * work,
            flop_per_s=1e10 / work,
            latency_s=1e-5 * transfers,
            bytes_per_s=1e9 / transfers,
        )
        for term, time_s in only(steps_of(noisy), config).terms_s.items():
            drawn[term].append(time_s)
    for term in (Term.ATTENTION, Term.MLP, Term.TP, Term.PP, Term.BUBBLE):
        errors = terms.error_s[term]
        of = {name.removeprefix("family "): error for name, error in errors.items()}
        work_s = sum(of.get(n, 0.0) for n in ("linear", "attention", "memory", "host"))
        moved_s = sum(of.get(n, 0.0) for n in ("tp", "pp", "embedding"))
        stated_s = math.hypot(work_s, moved_s) / ERROR_INFLATION
        assert np.std(drawn[term]) == pytest.approx(stated_s, rel=0.2), term


def test_of_a_measured_layout_the_step_is_known_and_its_terms_are_not(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=2)
    alone_s = only(steps_of(planted()), config).estimate.time_s
    terms = only(steps_of(planted(), config, 1.1 * alone_s), config)
    assert terms.estimate.time_s == pytest.approx(1.1 * alone_s, rel=1e-3)
    assert all(abs(error) < 1e-9 for error in error_sums(terms).values())
    assert sum(error**2 for error in terms.error_s[Term.ATTENTION].values()) > 0
    assert terms.source_frac[Term.UNEXPLAINED] == {Source.MEASURED: 1.0}


def test_small_layers_wait_for_launches_unless_a_graph_replays_them(layout: Layout) -> None:
    """A layer of 64 wide takes an A100 less than what a host takes to launch it."""
    small = layout(device="A100")
    shape = {"hidden_size": 8192, "ffn_hidden_size": 32768, "kv_channels": 2048}
    large = layout(device="A100", model={**shape, "seq_length": 2048})
    replayed = replace(small, uses_cuda_graphs=True, cuda_graph_scope=("full_iteration",))
    steps = fit_steps(prior_times("A100", is_attention_fused=True))
    mappings = [only(steps, config).terms_s for config in (small, large, replayed)]
    of_small, of_large, of_replayed = (
        one[Term.LAUNCHES] / sum(one[term] for term in WORK) for one in mappings
    )
    assert of_small > 0.3
    assert of_large < 0.01
    assert of_replayed == pytest.approx(0.0, abs=1e-9)


def test_what_was_never_sampled_across_nodes_widens_the_messages_and_what_waits_for_them(
    layout: Layout,
) -> None:
    base = prior_times("A100", is_attention_fused=True)
    near = layout(tp=2, device="A100", par={"ranks_per_node": 2})
    far = replace(near, parallelism=replace(near.parallelism, pp=4))
    terms = only(fit_steps(base, [KnownStep(config=near, time_s=1.0)]), far)
    unseen = "pp across nodes, never sampled"
    total_s = terms.estimate.time_s * terms.estimate.error_log[unseen]
    moved = {term: errors.get(unseen, 0.0) for term, errors in terms.error_s.items()}
    assert moved[Term.PP] + moved[Term.BUBBLE] == pytest.approx(total_s, rel=0.05)
    assert moved[Term.ATTENTION] == pytest.approx(0.0, abs=1e-6 * total_s)


def test_every_kind_of_operator_and_transfer_has_a_term() -> None:
    of_work = {term_of(kind, phase) for kind, phase in product(OperatorKind, Phase)}
    assert {*WORK, Term.OPTIMIZER, Term.HOST, Term.OFFLOAD} - {Term.LAUNCHES} <= of_work
    of_transfers = {term_of_role(role) for role in GroupRole}
    assert of_transfers == {Term.TP, Term.CP, Term.EP, Term.PP, Term.DP}
    assert term_of_role(GroupRole.EXPERT_DP) is Term.DP
    assert term_of_role(GroupRole.EXPERT_TP_EP) is Term.EP
