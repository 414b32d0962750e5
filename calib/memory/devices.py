"""Accelerators by short name: their driver's name and their memory."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..units import MIB
from ..workload.argument_values import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: its driver's name, and its memory in bytes (0: unknown)."""

    driver_name: str
    memory_nbytes: int = 0


# Names and memory.total are those of nvidia-smi on hosts with each device (MiB, of the whole
# board); torch sees 0.5 to 1 % less, net of the driver's share.  AMD's are the data sheets' GB.
_DEVICES: Mapping[str, Device] = {
    "h100": Device(driver_name="NVIDIA H100 80GB HBM3", memory_nbytes=81559 * MIB),
    "h100-pcie": Device(driver_name="NVIDIA H100 PCIe", memory_nbytes=81559 * MIB),
    "h200": Device(driver_name="NVIDIA H200", memory_nbytes=143771 * MIB),
    "h800": Device(driver_name="NVIDIA H800", memory_nbytes=81559 * MIB),
    "h20": Device(driver_name="NVIDIA H20", memory_nbytes=97871 * MIB),
    "gh200": Device(driver_name="NVIDIA GH200 480GB", memory_nbytes=97871 * MIB),
    "b200": Device(driver_name="NVIDIA B200", memory_nbytes=183359 * MIB),
    "b300": Device(driver_name="NVIDIA B300 SXM6 AC", memory_nbytes=275040 * MIB),
    "gb200": Device(driver_name="NVIDIA GB200", memory_nbytes=189471 * MIB),
    "gb300": Device(driver_name="NVIDIA GB300"),
    "a100": Device(driver_name="NVIDIA A100-SXM4-80GB", memory_nbytes=81920 * MIB),
    "a100-40": Device(driver_name="NVIDIA A100-SXM4-40GB", memory_nbytes=40960 * MIB),
    "a800": Device(driver_name="NVIDIA A800-SXM4-80GB", memory_nbytes=81920 * MIB),
    "a40": Device(driver_name="NVIDIA A40", memory_nbytes=46068 * MIB),
    "a10": Device(driver_name="NVIDIA A10", memory_nbytes=23028 * MIB),
    "l40s": Device(driver_name="NVIDIA L40S", memory_nbytes=46068 * MIB),
    "l40": Device(driver_name="NVIDIA L40", memory_nbytes=46068 * MIB),
    "l4": Device(driver_name="NVIDIA L4", memory_nbytes=23034 * MIB),
    "v100": Device(driver_name="Tesla V100-SXM2-32GB", memory_nbytes=32768 * MIB),
    "t4": Device(driver_name="Tesla T4", memory_nbytes=15360 * MIB),
    "mi300x": Device(driver_name="AMD Instinct MI300X", memory_nbytes=192 * 10**9),
    "mi325x": Device(driver_name="AMD Instinct MI325X", memory_nbytes=256 * 10**9),
    "mi350x": Device(driver_name="AMD Instinct MI350X", memory_nbytes=288 * 10**9),
    "mi355x": Device(driver_name="AMD Instinct MI355X", memory_nbytes=288 * 10**9),
}
_OTHERS = tuple(
    Device(driver_name=name, memory_nbytes=number * MIB)
    for name, number in (
        ("NVIDIA H100 NVL", 95830),
        ("NVIDIA H200 NVL", 143771),
        ("NVIDIA GH200 120GB", 97871),  # the name says the memory of its Grace host
        ("NVIDIA RTX A6000", 49140),
        ("NVIDIA RTX 6000 Ada Generation", 49140),
        ("NVIDIA GeForce RTX 3090", 24576),
        ("NVIDIA GeForce RTX 4090", 24564),
        ("NVIDIA GeForce RTX 5090", 32607),
        ("NVIDIA GeForce RTX 2080 Ti", 11264),
        ("Quadro RTX 8000", 49152),
    )
)
"""Devices from the same source without a short name."""
SHORT_NAMES = tuple(_DEVICES)
"""All short names."""
_CPU = "cpu"
_USUAL = ("h100", "h200", "b200", "a100", "mi300x")
"""Suggestions for a name that resembles no known one."""
_VENDORS = ("nvidia ", "tesla ", "quadro ", "geforce ", "amd ", "accelerator")
"""Prefixes of driver names, of known and unknown devices."""
_MAKERS = re.compile(r"^(nvidia|tesla|amd|instinct|geforce)-")
_SIZE = re.compile(r"-(?:mig-)?\dg\.(\d+)gb|-(\d+)gb?\b")
"""Memory size in a driver's name: of the whole device, or of a slice, which comes last."""


def known_device(name: str) -> Device:
    """Return the device of a short name (``H100``, ``b200``) or of a driver's name.

    An unknown driver's name is returned unchanged, with the memory stated in it.  Raises
    ``ConfigError`` with the nearest names for any other word.

    >>> known_device("H100").driver_name, known_device("NVIDIA B200").memory_nbytes >> 30
    ('NVIDIA H100 80GB HBM3', 179)
    >>> [known_device(n).memory_nbytes >> 30 for n in ("V100-PCIE-16GB", "A100 3g.20gb")]
    [16, 20]
    >>> {known_device(n).driver_name for n in ("A100-40", "A100-40GB", "A100 40GB")}
    {'NVIDIA A100-SXM4-40GB'}
    """
    low = _plain(name)
    if low == _CPU:
        return Device(driver_name=_CPU)
    for short, device in (*_DEVICES.items(), *(("", one) for one in _OTHERS)):
        if _squeezed(low) in (_squeezed(short), _squeezed(_plain(device.driver_name))):
            return device
    sizes = _SIZE.findall(low)
    is_named = any(low.startswith(f"{short}-") for short in _DEVICES)
    if name.lower().startswith(_VENDORS) or (is_named and sizes):
        nbytes = 1024 * MIB * int(next(filter(None, sizes[-1]))) if sizes else 0
        return Device(driver_name=name.strip(), memory_nbytes=nbytes)
    near = difflib.get_close_matches(low, _DEVICES, n=3, cutoff=0.5) or _USUAL
    raise ConfigError(
        f"--device {shown(name)} is not known; give the name that its driver reports, or did you "
        f"mean {', '.join(word.upper() for word in near)}?"
    )


def _plain(name: str) -> str:
    """Return the name in lower case with hyphens, without its maker."""
    low = re.sub(r"[\s_]+", "-", name.strip().lower())
    while (short := _MAKERS.sub("", low)) != low:
        low = short
    return low


def _squeezed(plain: str) -> str:
    """Return a plain name without hyphens and the parts that people leave out.

    >>> [_squeezed(name) for name in ("h100-sxm", "rtx-4090", "a100-sxm4-40gb", "h100-nvl")]
    ['h100', '4090', 'a10040', 'h100nvl']
    """
    return re.sub(r"sxm\d?|hbm\d\w?|^rtx|(?<=\d)gb(?=-|$)|-", "", plain)


def known_nbytes(name: str) -> int | None:
    """Return the memory in bytes of a device by a name of any origin; None if unknown.

    >>> known_nbytes("H100") == known_nbytes("NVIDIA H100 80GB HBM3"), known_nbytes("a cluster")
    (True, None)
    """
    try:
        return known_device(name).memory_nbytes or None
    except ConfigError:
        return None
