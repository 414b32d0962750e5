"""Data-sheet rates of cards, by the names that their drivers give."""

from __future__ import annotations

import pytest

from forerun.calib.fit.priors import device_prior

SHEETS = {
    "NVIDIA L40S": (362e12, 0.864e12, 2.0),
    "NVIDIA L40": (181e12, 0.864e12, 2.0),
    "NVIDIA H20": (148e12, 4.0e12, 2.0),
    "NVIDIA B300 SXM6 AC": (2250e12, 8.0e12, 2.0),
    "NVIDIA GB300": (2500e12, 8.0e12, 2.0),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (504e12, 1.792e12, 2.0),
    "AMD Instinct MI300X": (1307e12, 5.3e12, 2.0),
    "AMD Instinct MI325X": (1307e12, 6.0e12, 2.0),
    "AMD Instinct MI350X": (2307e12, 8.0e12, 2.0),
    "AMD Instinct MI355X": (2517e12, 8.0e12, 2.0),
    "AMD Instinct MI250X": (362e12, 3.2e12, 1.0),
}
"""Dense FLOP/s of 2-byte elements, bytes/s of the memory, and how much faster 1-byte products are
(CDNA 2 has none); data sheets of NVIDIA and AMD."""


@pytest.mark.parametrize("name", SHEETS)
def test_rates_are_those_of_the_data_sheet(name: str) -> None:
    flop_per_s, bytes_per_s, of_fp8 = SHEETS[name]
    prior = device_prior(name)
    sheet = prior.peaks_for(2)
    assert sheet.flop_per_s == pytest.approx(flop_per_s, rel=1e-3)
    assert sheet.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert prior.peaks_for(1).flop_per_s == pytest.approx(of_fp8 * flop_per_s, rel=1e-3)


def test_what_large_products_reach_is_known_of_a_vendor_whose_cards_were_measured() -> None:
    """Eight cards of NVIDIA and three of AMD had their best product looked for, L40S not."""
    for name in ("NVIDIA H800", "AMD Instinct MI355X"):
        best = device_prior(name).attainable(2)
        assert best is not None and 0.5 < best.frac <= best.ceiling_frac < 1.0
    assert device_prior("NVIDIA L40S").attainable(2) is None
