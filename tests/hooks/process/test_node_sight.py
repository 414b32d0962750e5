"""Topology of a node, read from planted trees of ``/sys``."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.calib.records.cluster import Cluster, SeenNode, StatedNodes
from forerun.hooks.process.node_topology import (
    VARIABLES,
    NodeTopology,
    detect_node,
)
from forerun.hooks.process.settings import RankInfo

NDR = "400 Gb/sec (4X NDR)"
HDR = "200 Gb/sec (4X HDR)"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def slot(place: Path, *, speed: str = "32.0 GT/s PCIe", width: int = 16, numa: int = 0) -> None:
    for which in ("current", "max"):
        write(place / f"{which}_link_speed", speed)
        write(place / f"{which}_link_width", str(width))
    write(place / "numa_node", str(numa))


def gpu(root: Path, number: int, *, numa: int = 0) -> None:
    place = root / f"bus/pci/devices/0000:{number:02x}:00.0"
    write(place / "vendor", "0x10de")
    write(place / "class", "0x030200")
    slot(place, numa=numa)
    write(place / "current_link_speed", "2.5 GT/s PCIe")  # it is idle


def port(
    root: Path, name: str, *, rate: str = NDR, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> None:
    card = root / "class/infiniband" / name
    write(card / "ports/1/rate", rate)
    write(card / "ports/1/state", state)
    write(card / "ports/1/link_layer", layer)
    slot(card / "device")


def interface(root: Path, name: str, *, speed: str = "25000", has_device: bool = True) -> None:
    place = root / "class/net" / name
    write(place / "speed", speed)
    write(place / "operstate", "up")
    if has_device:
        slot(place / "device")


def seen(root: Path, **environ: str) -> SeenNode:
    return detect_node(environ, num_ranks=16, num_local_ranks=8, root=root)


@pytest.fixture
def dgx(tmp_path: Path) -> Path:
    """Eight GPUs, eight cards of 400 Gb/s, two slower ones for storage, an office network."""
    for number in range(8):
        gpu(tmp_path, number, numa=number // 4)
        port(tmp_path, f"mlx5_{number}")
    for number in (8, 9):
        port(tmp_path, f"mlx5_{number}", rate=HDR)
    port(tmp_path, "mlx5_10", state="1: DOWN")
    interface(tmp_path, "eno1", speed="10000")
    return tmp_path


def test_cards_are_the_active_ports_of_the_highest_rate(dgx: Path) -> None:
    node = seen(dgx)
    assert (node.num_gpus, node.num_cards, node.wire) == (8, 8, "infiniband")
    assert node.card_bytes_per_s == 50e9
    assert node.gpu_numa == (0, 0, 0, 0, 1, 1, 1, 1)
    # PCIe 5 of sixteen lanes, also of a GPU that idles: 63.0 GB/s by the specification.
    assert node.gpu_pcie_bytes_per_s == pytest.approx(63.0e9, rel=1e-3)
    assert (node.num_ranks, node.num_local_ranks) == (16, 8)


@pytest.mark.parametrize(
    ("allowed", "num_cards", "rate"),
    [
        ("mlx5_0,mlx5_1", 2, 50e9),
        ("mlx5", 8, 50e9),
        ("=mlx5_1", 1, 50e9),
        ("^mlx5_0,mlx5_1", 6, 50e9),
        ("mlx5_8,mlx5_9", 2, 25e9),
        ("mlx5_3:1", 1, 50e9),
        ("=mlx5_3:2", 1, 1.25e9),  # none is left: the office network
    ],
)
def test_nccls_list_of_cards_is_followed(
    dgx: Path, allowed: str, num_cards: int, rate: float
) -> None:
    node = seen(dgx, NCCL_IB_HCA=allowed)
    assert (node.num_cards, node.card_bytes_per_s) == (num_cards, rate)
    assert node.variable("NCCL_IB_HCA") == allowed


def test_without_infiniband_it_goes_over_sockets(dgx: Path) -> None:
    interface(dgx, "docker0", speed="100000", has_device=False)
    interface(dgx, "ens2", speed="100000")
    forced = seen(dgx, NCCL_IB_DISABLE="1")
    assert (forced.num_cards, forced.card_bytes_per_s, forced.wire) == (1, 12.5e9, "socket")
    named = seen(dgx, NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="eno")
    assert named.card_bytes_per_s == 1.25e9


def test_other_cards_alone_may_have_a_plugin(tmp_path: Path) -> None:
    for number in range(4):
        interface(tmp_path, f"hsn{number}", speed="200000")
    node = seen(tmp_path)
    assert (node.num_cards, node.card_bytes_per_s, node.wire) == (4, 25e9, "ethernet")


def test_a_virtual_card_of_unknown_rate_tells_nothing(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", speed="-1")
    assert seen(tmp_path).num_cards == 0
    assert seen(tmp_path, NCCL_IB_DISABLE="1").num_cards == 1


def test_roce_is_told_from_infiniband(tmp_path: Path) -> None:
    port(tmp_path, "rocep1s0", rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    assert seen(tmp_path).wire == "roce"


def test_a_narrow_slot_is_seen(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    slot(tmp_path / "class/infiniband/mlx5_0/device", speed="8.0 GT/s PCIe", width=8)
    # PCIe 3 of eight lanes: 7.88 GB/s by the specification.
    assert seen(tmp_path).card_pcie_bytes_per_s == pytest.approx(7.88e9, rel=1e-3)


@pytest.mark.parametrize("text", ["", "Unknown", "-1", "\x00\xff", "9" * 300, "4,0"])
def test_nonsense_in_files_is_nothing(tmp_path: Path, text: str) -> None:
    gpu(tmp_path, 0)
    port(tmp_path, "mlx5_0", rate=text)
    interface(tmp_path, "eth0", speed=text)
    for name in ("max_link_speed", "max_link_width", "numa_node"):
        write(tmp_path / "bus/pci/devices/0000:00:00.0" / name, text)
    node = seen(tmp_path)
    assert node.num_gpus == 1 and node.card_bytes_per_s >= 0.0


def test_where_nothing_is_there_nothing_is_told(tmp_path: Path) -> None:
    assert seen(tmp_path) == SeenNode(num_ranks=16, num_local_ranks=8)


def test_only_settings_of_nccl_are_kept_and_short(tmp_path: Path) -> None:
    environ = {name: "x" * 500 for name in VARIABLES}
    node = seen(tmp_path, WANDB_API_KEY="secret", NCCL_DEBUG_FILE="/w/me", **environ)
    assert len(node.variables) == len(VARIABLES)
    text = str(Cluster(seen=(node,)).to_json())
    assert "secret" not in text and "/w/me" not in text
    assert len(text) < 3000


def test_the_first_rank_of_a_node_tells_and_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankInfo(rank=8, world_size=16, local_rank=0, local_world_size=8, run_id="r")
    topology = NodeTopology(rank, {}, StatedNodes(domain=36))
    cluster = Cluster.from_json(topology.cluster_json())
    assert cluster.stated.domain == 36 and cluster.node.num_local_ranks == 8
    monkeypatch.setattr("forerun.hooks.process.node_topology.detect_node", None)
    assert topology.cluster_json() is topology.cluster_json()
    other = RankInfo(rank=9, world_size=16, local_rank=1, local_world_size=8, run_id="r")
    assert NodeTopology(other, {}).cluster_json() == {}
