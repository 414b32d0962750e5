"""What the step model is held to: sets, protocols, what was reached before, and bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.calib.samples.step_rows import StepRow
from forerun.calib.validation.step_protocols import (
    LEAVE_ONE_OUT,
    Fold,
    calibrate_on,
    designed,
    named,
)

Design = Callable[[Sequence[StepRow], int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure and what it has to reach."""

    figure: str
    limit: float
    is_least: bool = False
    """The figure has to be at least the limit, not at most."""

    def shown(self, value: float) -> str:
        """The value as the table shows it: tau with two digits, all else in percent."""
        return f"{value:.2f}" if self.figure == "kendall_tau" else f"{100 * value:.1f}"

    def is_met(self, value: float | None) -> bool:
        """Whether the value, as shown, reaches the limit."""
        if value is None:
            return False
        found, limit = float(self.shown(value)), float(self.shown(self.limit))
        return found >= limit if self.is_least else found <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One line of the acceptance table."""

    title: str
    table: str
    """Name of the file without its ending."""
    protocol: str
    """``calibrate_K``, ``designed_K`` or a named protocol."""
    bars: tuple[Bar, ...]
    reference: str
    operators: tuple[str, ...] = ()
    """Operator and collective tables that the model is built on."""
    machine: str = ""
    """Only machines whose name matches."""
    is_scored: Callable[[StepRow], bool] | None = None
    """Only these rows are scored; all calibrate."""

    def usable(self, rows: Sequence[StepRow]) -> list[StepRow]:
        """The rows of the machines that the claim is of."""
        return [row for row in rows if re.search(self.machine, row.machine)]

    def folds(self, rows: Sequence[StepRow], num_draws: int, design: Design) -> list[Fold]:
        """The folds of the protocol."""
        kind, _, number = self.protocol.rpartition("_")
        if kind == "calibrate":
            return list(calibrate_on(rows, int(number), num_draws))
        if kind == "designed":
            return list(designed(rows, int(number), design))
        return list(named(rows, self.protocol))


def _has_experts(row: StepRow) -> bool:
    return row.config.model.experts is not None


def _mape(limit: float) -> Bar:
    return Bar(figure="mape_frac", limit=limit)


_RANKING = (
    Bar(figure="kendall_tau", limit=0.85, is_least=True),
    Bar(figure="regret_median_frac", limit=0.01),
    Bar(figure="regret_p95_frac", limit=0.05),
)
_SINGLE, _MULTI = "e2e_vtrain_single_node", "e2e_vtrain_multi_node"
_SINGLE_TITLE = "vTrain single node (synthetic)"
_SIMUMAX, _SIMUMAX_OPS = "e2e_simumax_b200_8gpu", ("ops_simumax_gemm_attention",)
_BRIDGE = "e2e_megatron_bridge"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        title="paper's configurations on Perlmutter (implied)",
        table="steps_paper_implied",
        protocol="calibrate_0",
        operators=("ops_ett_fwd_bwd", "ops_ett_optimizer", "coll_ett"),
        machine="Perlmutter",
        reference="3.40, mean of three",
        bars=(_mape(0.025),),
    ),
    Claim(
        title="SC'21 / Selene A100 tables",
        table="e2e_small_tables",
        protocol="calibrate_2",
        machine="Korthikanti|SC'?21|Narayanan|Selene",
        reference="Calculon 3.65, max 8.87",
        bars=(_mape(0.035), Bar(figure="max_ape_frac", limit=0.08)),
    ),
    *(
        Claim(
            title=_SINGLE_TITLE,
            table=_SINGLE,
            protocol=f"calibrate_{count}",
            reference=before,
            bars=(_mape(limit),),
        )
        for count, before, limit in ((5, "4.6", 0.045), (10, "3.3", 0.032), (40, "0.8", 0.008))
    ),
    Claim(
        title=_SINGLE_TITLE,
        table=_SINGLE,
        protocol="designed_10",
        reference="2.0",
        bars=(_mape(0.02),),
    ),
    Claim(
        title="vTrain multi node",
        table=_MULTI,
        protocol=LEAVE_ONE_OUT,
        reference="6.6",
        bars=(_mape(0.05),),
    ),
    Claim(
        title="vTrain multi node",
        table=_MULTI,
        protocol="calibrate_5",
        reference="10.3",
        bars=(_mape(0.08),),
    ),
    Claim(
        title="SimuMax B200",
        table=_SIMUMAX,
        protocol="calibrate_0",
        operators=_SIMUMAX_OPS,
        reference="12.3; SimuMax 5.3, memory 1.4",
        bars=(_mape(0.08), Bar(figure="memory_mape_frac", limit=0.02)),
    ),
    Claim(
        title="SimuMax B200",
        table=_SIMUMAX,
        protocol="calibrate_3",
        operators=_SIMUMAX_OPS,
        reference="4.4, p90 of draws 7.1",
        bars=(
            _mape(0.04),
            Bar(figure="p90_draw_mape_frac", limit=0.06),
            Bar(figure="memory_mape_frac", limit=0.02),
        ),
    ),
    Claim(
        title="Sailor GH200",
        table="e2e_sailor",
        protocol="calibrate_0",
        operators=("ops_sailor_layer_profiles",),
        reference="18.4 naive",
        bars=(_mape(0.07),),
    ),
    *(
        Claim(
            title=f"Megatron-Bridge{title}",
            table=_BRIDGE,
            protocol="calibrate_3",
            reference="-",
            bars=(_mape(0.15),),
            is_scored=is_scored,
        )
        for title, is_scored in (
            ("", None),
            (", dense", lambda row: not _has_experts(row)),
            (", MoE", _has_experts),
            (", bf16", lambda row: row.config.fp8.value == "none"),
            (", fp8 and fp4", lambda row: row.config.fp8.value != "none"),
        )
    ),
    Claim(
        title="ranking, vTrain single node (synthetic)",
        table=_SINGLE,
        protocol="calibrate_10",
        reference="trivial rule tau 0.55, regret 3.1 %",
        bars=_RANKING,
    ),
    Claim(
        title="ranking, vTrain multi node",
        table=_MULTI,
        protocol="calibrate_5",
        reference="trivial rule tau 0.49, regret 9 %",
        bars=_RANKING,
    ),
)
FIGURE_NAMES: Mapping[str, str] = {
    "mape_frac": "",
    "max_ape_frac": "max",
    "p90_draw_mape_frac": "p90 of draws",
    "memory_mape_frac": "memory",
    "kendall_tau": "tau",
    "regret_median_frac": "regret",
    "regret_p95_frac": "p95",
}
