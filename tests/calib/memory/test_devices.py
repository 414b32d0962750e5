"""Short names lead to drivers' names, which the rest of the model knows by the same short ones."""

from __future__ import annotations

import pytest

from forerun.calib.errors import ConfigError
from forerun.calib.fit.priors import UNKNOWN_DEVICE, device_prior
from forerun.calib.memory.devices import SHORT_NAMES, known_device
from forerun.calib.units import GIB

SHEET_GB = {"h100": 80, "h200": 141, "b200": 180, "a100": 80, "a100-40": 40, "mi300x": 192}
"""Memory by the vendors' data sheets."""


@pytest.mark.parametrize("short", SHORT_NAMES)
def test_a_short_name_is_the_device_that_priors_know(short: str) -> None:
    device = known_device(short.upper())
    text = device_prior(device.driver_name).name
    assert text != UNKNOWN_DEVICE and short.startswith(text)
    assert known_device(device.driver_name) == device


@pytest.mark.parametrize(("short", "gb"), SHEET_GB.items())
def test_memory_is_what_the_data_sheet_has(short: str, gb: int) -> None:
    # Makers mean 2**30 by a GB of some devices and 1e9 of others, and boards keep a part.
    assert 0.93 * gb * 1e9 < known_device(short).memory_nbytes < 1.02 * gb * GIB


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("Tesla V100-SXM2-16GB", 16),
        ("Tesla V100-PCIE-32GB", 32),
        ("V100-PCIE-32GB", 32),
        ("NVIDIA A100-PCIE-40GB", 40),
        ("A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10),
        ("NVIDIA H100 NVL", 94),
        ("NVIDIA GH200 120GB", 96),
        ("NVIDIA GeForce RTX 4090", 24),
        ("GeForce RTX 4090", 24),
        ("RTX 4090", 24),
        ("Quadro RTX 8000", 48),
    ],
)
def test_every_name_of_a_driver_says_its_memory(name: str, gib: int) -> None:
    """With its maker's words or without, whole or a slice."""
    assert 0.97 * gib * GIB < known_device(name).memory_nbytes <= gib * GIB


def test_a_drivers_name_that_nobody_knows_is_taken() -> None:
    device = known_device("NVIDIA Next 9000")
    assert (device.driver_name, device.memory_nbytes) == ("NVIDIA Next 9000", 0)


@pytest.mark.parametrize(("word", "near"), [("B20", "B200"), ("h1000", "H100"), ("zzz", "H100")])
def test_another_word_is_refused_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean .*{near}"):
        known_device(word)
