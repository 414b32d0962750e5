"""Links between GPUs: read by the real ``nvidia-ml-py`` from a mock of the driver's library."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.records.cluster import LINKS, Cluster, SeenNode
from forerun.launch.known.node_links import detect_links, write_links

pynvml: Any = pytest.importorskip("pynvml")

LinksOf = Callable[[object], SeenNode]


@pytest.fixture
def links_of(monkeypatch: pytest.MonkeyPatch) -> LinksOf:
    """Return what is detected with a driver's library; what a mock lacks, the driver lacks."""
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)

    def links(driver: object) -> SeenNode:
        def function(name: str) -> Any:
            if (known := getattr(driver, name, None)) is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return known

        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", function)
        return detect_links()

    return links


class Driver:
    """A driver's library whose first GPU has links to ``peers``."""

    def __init__(self, *, num_gpus: int, peers: list[str], fabric: bytes = b"", state: int = 3):
        self.num_gpus, self.peers, self.state = num_gpus, peers, state
        self.cluster = fabric.ljust(16, b"\0")
        self.num_open = 0

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = self.num_gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, out: Any) -> int:
        out._obj.value = 1
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, out: Any) -> int:
        out._obj.value = int(link < len(self.peers))
        return 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, device: Any, link: int, out: Any) -> int:
        out._obj.value = 2 if self.peers[link] == "switch" else 0
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, device: Any, link: int, out: Any) -> int:
        out._obj.busId = self.peers[link].encode()
        return 0

    def nvmlDeviceGetGpuFabricInfoV(self, device: Any, out: Any) -> int:
        # The header's size and version: 36 bytes, version 2.
        assert ctypes.sizeof(out._obj) == 0x24 and out._obj.version == 0x02000024
        ctypes.memmove(out._obj.clusterUuid, self.cluster, 16)
        out._obj.cliqueId, out._obj.state = 7, self.state
        return 0


@pytest.mark.parametrize(
    ("num_gpus", "peers", "joint"),
    [
        (8, ["switch"] * 18, "switch"),
        (4, ["a", "a", "b", "b", "c", "c"], "mesh"),
        (8, ["a", "b", "c", "c", "d", "d"], "cube"),
        (8, [], "pcie"),
        (8, ["a", "a"], "bridge"),
        (4, ["a", "b"], ""),
        (1, [], ""),
    ],
)
def test_what_joins_gpus_is_told_by_their_links(
    links_of: LinksOf, num_gpus: int, peers: list[str], joint: str
) -> None:
    driver = Driver(num_gpus=num_gpus, peers=peers)
    links = links_of(driver)
    assert (links.num_gpus, links.joint) == (num_gpus, joint)
    assert driver.num_open == 0


@pytest.mark.parametrize(("mode", "joint"), [(0, "pcie"), (1, "")])
def test_instances_of_a_gpu_are_not_joined_by_pcie(
    links_of: LinksOf, mode: int, joint: str
) -> None:
    class Parted(Driver):
        def nvmlDeviceGetMigMode(self, device: Any, current: Any, pending: Any) -> int:
            current._obj.value, pending._obj.value = mode, 1
            return 0

    links = links_of(Parted(num_gpus=8, peers=[]))
    assert (links.num_gpus, links.joint) == (8, joint)


def test_a_domain_of_hosts_has_a_name(links_of: LinksOf) -> None:
    rack = links_of(Driver(num_gpus=4, peers=["switch"], fabric=b"rack"))
    assert rack.fabric == b"rack".ljust(16, b"\0").hex() + "/7"
    none = links_of(Driver(num_gpus=8, peers=["switch"]))
    starting = links_of(Driver(num_gpus=4, peers=["switch"], fabric=b"rack", state=2))
    assert none.fabric == starting.fabric == "none"


def test_a_driver_or_package_that_is_missing_or_old_is_no_fault(
    links_of: LinksOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        def nvmlInitWithFlags(self, flags: int) -> int:
            return 0

        def nvmlShutdown(self) -> int:
            return 0

    assert links_of(object()) == links_of(Old()) == SeenNode()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect_links() == SeenNode()


def test_an_older_driver_without_fabrics_still_has_links(links_of: LinksOf) -> None:
    class Older(Driver):
        nvmlDeviceGetGpuFabricInfoV = None

    links = links_of(Older(num_gpus=8, peers=["switch"]))
    assert links == SeenNode(num_gpus=8, joint="switch")


def test_links_are_written_where_there_are_any(links_of: LinksOf, tmp_path: Path) -> None:
    links_of(object())
    write_links(tmp_path)
    assert list(tmp_path.iterdir()) == []
    links_of(Driver(num_gpus=8, peers=["switch"]))
    write_links(tmp_path)
    value = json.loads((tmp_path / LINKS).read_text())
    assert Cluster.from_json(value).seen == (SeenNode(num_gpus=8, joint="switch", fabric="none"),)
    (tmp_path / "file").write_text("")
    write_links(tmp_path / "file")  # nowhere to write to
