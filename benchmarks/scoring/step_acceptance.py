"""Acceptance criteria of the step model: sets, protocols, and bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forerun.benchmarks.baselines.steps import ConstantRate, PerfectScaling, TenTerms
from forerun.benchmarks.protocols.scores import LEAVE_ONE_OUT, Fold, machines, step_folds
from forerun.benchmarks.protocols.steps import LEAVE_RELEASE, MORE_NODES, SCALE_OUT, named, series
from forerun.calib.records.step_rows import StepRow

Design = Callable[[Sequence[StepRow], int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure and its limit."""

    figure: str
    limit: float
    is_least: bool = False
    """The limit is a lower bound, not an upper one."""

    def is_met(self, value: float | None) -> bool:
        """Return True if the value, as shown, reaches the limit."""
        if value is None:
            return False
        rounded, limit = (float(shown(self.figure, number)) for number in (value, self.limit))
        return rounded >= limit if self.is_least else rounded <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One line of the acceptance table."""

    title: str
    table: str
    """Name of the file without its suffix."""
    protocol: str
    """``calibrate_K``, ``designed_K`` or a named protocol."""
    bars: tuple[Bar, ...] = ()
    better_than: tuple[str, ...] = ()
    """Baselines that it has to beat, by a paired bootstrap."""
    pool: str = ""
    """Lines of one pool and protocol are also shown pooled, under this title."""
    min_scales: int = 1
    """Only series of at least this many numbers of GPUs."""
    operators: tuple[str, ...] = ()
    """Operator and collective tables that the model is built on."""
    machine: str = ""
    """Only machines whose name matches."""
    is_scored: Callable[[StepRow], bool] | None = None
    """Only these rows are scored; all calibrate."""

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key shared by claims with the same folds, which are scored once."""
        return self.table, self.protocol, self.machine, self.min_scales, self.operators

    @property
    def figures(self) -> tuple[str, ...]:
        """Figures that the line shows for every model."""
        return tuple(bar.figure for bar in self.bars) or ("mape_frac",)

    def usable(self, rows: Sequence[StepRow]) -> list[StepRow]:
        """Return the rows of the claim's machines and series."""
        here = [row for row in rows if re.search(self.machine, row.machine)]
        if self.min_scales == 1:
            return here
        return [here[i] for positions in series(here, self.min_scales).values() for i in positions]

    def folds(self, rows: Sequence[StepRow], num_draws: int, design: Design) -> list[Fold]:
        """Return the folds of the protocol."""
        kind, _, number = self.protocol.rpartition("_")
        if kind == "calibrate":
            return list(step_folds(rows, int(number), num_draws))
        if kind == "designed":
            return list(designed(rows, int(number), design))
        return list(named(rows, self.protocol))


def designed(rows: Sequence[StepRow], num_rows: int, design: Design) -> Iterator[Fold]:
    """Yield folds calibrated on the rows that ``design`` picks; it sees no measured time."""
    for machine, positions in machines(rows).items():
        if len(positions) > num_rows:
            chosen = design([rows[i] for i in positions], num_rows)
            train = [positions[i] for i in chosen]
            yield Fold(f"designed_{num_rows}", machine, 0, positions, train)


def _has_experts(row: StepRow) -> bool:
    return row.config.model.experts is not None


def _mape(limit: float) -> Bar:
    return Bar(figure="mape_frac", limit=limit)


def _claims(
    title: str,
    table: str,
    bars: Mapping[str, float],
    operators: tuple[str, ...] = (),
) -> Iterator[Claim]:
    """Return claims by protocol, from the bars of their errors."""
    for protocol, limit in bars.items():
        yield Claim(
            title=title,
            table=table,
            protocol=protocol,
            bars=(_mape(limit),),
            operators=operators,
        )


def _half_width(limit: float) -> Bar:
    return Bar(figure="interval_width_frac", limit=limit)


_RANKING = (
    Bar(figure="kendall_tau", limit=0.85, is_least=True),
    Bar(figure="regret_median_frac", limit=0.01),
    Bar(figure="regret_p95_frac", limit=0.05),
)
_MEMORY = Bar(figure="memory_mape_frac", limit=0.02)
_SINGLE, _MULTI = "e2e_vtrain_single_node", "e2e_vtrain_multi_node"
_SIMUMAX, _SIMUMAX_OPS = "e2e_simumax_b200_8gpu", ("ops_simumax_gemm_attention",)
_SAILOR, _SAILOR_OPS = "e2e_sailor", ("ops_sailor_layer_profiles",)
_BRIDGE = "e2e_megatron_bridge"
_EXPERT_BARS = (_mape(0.07), Bar(figure="max_ape_frac", limit=0.6))
_RATE, _TERMS, _PERFECT = ConstantRate.name, TenTerms.name, PerfectScaling.name
_SCALED = {
    "MLPerf systems": "e2e_mlperf_llm_systems",
    "DGXC": "e2e_dgxc_scaling",
    "small tables": "e2e_small_tables",
}
_NODES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Sailor GH200": (_SAILOR, _SAILOR_OPS),
    "llm-foundry, FSDP": ("e2e_llmfoundry_mpt_fsdp", ()),
    **{title: (table, ()) for title, table in _SCALED.items()},
    "nanotron": ("e2e_nanotron_llama1b", ()),
}
_PAPERS: tuple[Claim, ...] = (
    Claim(
        title="SC'21 / Selene A100 tables",
        table="e2e_small_tables",
        protocol="calibrate_2",
        machine="Korthikanti|SC'?21|Narayanan|Selene",
        bars=(_mape(0.035), Bar(figure="max_ape_frac", limit=0.08)),
    ),
)
_VTRAIN: tuple[Claim, ...] = (
    *_claims(
        "vTrain single node (synthetic)",
        _SINGLE,
        {
            "calibrate_5": 0.045,
            "calibrate_10": 0.032,
            "calibrate_40": 0.008,
            "designed_10": 0.02,
        },
    ),
    *_claims("vTrain multi node", _MULTI, {LEAVE_ONE_OUT: 0.05, "calibrate_5": 0.065}),
)
_ONE_STACK: tuple[Claim, ...] = (
    Claim(
        title="SimuMax B200",
        table=_SIMUMAX,
        protocol="calibrate_0",
        operators=_SIMUMAX_OPS,
        bars=(_mape(0.055), _half_width(0.2), _MEMORY),
    ),
    Claim(
        title="SimuMax B200",
        table=_SIMUMAX,
        protocol="calibrate_3",
        operators=_SIMUMAX_OPS,
        bars=(
            _mape(0.03),
            _half_width(0.08),
            Bar(figure="p90_draw_mape_frac", limit=0.06),
            _MEMORY,
        ),
    ),
    *(
        Claim(
            title="Megatron-Bridge cards, H100" if machine else "Megatron-Bridge cards",
            table="e2e_bridge_cards",
            protocol=protocol,
            bars=(_mape(limit),),
            machine=machine,
        )
        for protocol, machine, limit in (
            ("calibrate_0", "", 0.25),
            ("calibrate_3", "H100", 0.12),
        )
    ),
    Claim(title="Megatron-Bridge", table=_BRIDGE, protocol=LEAVE_RELEASE),
    *_claims(
        "Sailor GH200",
        _SAILOR,
        {"calibrate_0": 0.042, "calibrate_3": 0.035},
        operators=_SAILOR_OPS,
    ),
    *_claims(
        "llm-foundry, FSDP",
        "e2e_llmfoundry_mpt_fsdp",
        {"calibrate_0": 0.08, "calibrate_3": 0.08},
    ),
    *(
        Claim(
            title=f"Megatron-Bridge{title}",
            table=_BRIDGE,
            protocol="calibrate_3",
            bars=bars,
            is_scored=is_scored,
        )
        for title, bars, is_scored in (
            ("", (_mape(0.08),), None),
            (", dense", (_mape(0.08),), lambda row: not _has_experts(row)),
            (", MoE", _EXPERT_BARS, _has_experts),
            (", bf16", (), lambda row: row.config.fp8.value == "none"),
            (", fp8 and fp4", (), lambda row: row.config.fp8.value != "none"),
        )
    ),
)
_AGAINST_BASELINES: tuple[Claim, ...] = (
    *(
        Claim(
            title=title,
            table=table,
            protocol=SCALE_OUT,
            min_scales=3,
            better_than=(_RATE, _TERMS, _PERFECT),
            pool=", ".join(_SCALED),
        )
        for title, table in _SCALED.items()
    ),
    *(
        Claim(
            title=title,
            table=table,
            protocol="calibrate_3",
            better_than=(_RATE, _TERMS),
            pool=", ".join((*_SCALED, "nanotron")),
        )
        for title, table in (*_SCALED.items(), ("nanotron", "e2e_nanotron_llama1b"))
    ),
)
_MORE_NODES: tuple[Claim, ...] = tuple(
    Claim(
        title=title,
        table=table,
        protocol=MORE_NODES,
        operators=operators,
        bars=(Bar(figure="median_ape_frac", limit=0.06),),
        better_than=(_PERFECT, _RATE, _TERMS),
        pool=", ".join(_NODES),
    )
    for title, (table, operators) in _NODES.items()
)
_ORDERS: tuple[Claim, ...] = (
    Claim(
        title="ranking, vTrain single node (synthetic)",
        table=_SINGLE,
        protocol="calibrate_10",
        bars=_RANKING,
    ),
    Claim(
        title="ranking, vTrain multi node",
        table=_MULTI,
        protocol="calibrate_5",
        bars=_RANKING,
    ),
)
CLAIMS: tuple[Claim, ...] = (
    *_PAPERS,
    *_VTRAIN,
    *_ONE_STACK,
    *_AGAINST_BASELINES,
    *_MORE_NODES,
    *_ORDERS,
)
FIGURE_NAMES: Mapping[str, str] = {
    "mape_frac": "",
    "median_ape_frac": "median",
    "max_ape_frac": "max",
    "p90_draw_mape_frac": "p90 of draws",
    "interval_width_frac": "half-width",
    "memory_mape_frac": "memory",
    "kendall_tau": "tau",
    "regret_median_frac": "regret",
    "regret_p95_frac": "p95",
}


def shown(figure: str, value: float) -> str:
    """Return a figure as the table shows it: tau with two digits, all else in percent."""
    return f"{value:.2f}" if figure == "kendall_tau" else f"{100 * value:.1f}"
