"""What ``moonpool doctor`` says of this host, and what it would say of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.options import TcpOptions, TransferOptions
from transfer import host_report as report_module
from transfer.host_report import host_report
from transfer.topology import Interface, RdmaDevice, interfaces, rdma_devices
from transfer.ucx.library import load_ucx


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_every_kind_of_peer_has_a_way_and_a_reason() -> None:
    report = host_report(TransferOptions())
    assert all(report.values())
    assert report["same process"].startswith("local")
    assert report["other hosts"].startswith("tcp")
    assert "transfer.tcp.host" in report["other hosts"]
    open_host = TransferOptions(transports=("tcp",), tcp=TcpOptions(host="10.0.0.1"))
    assert "this host only" not in host_report(open_host)["other hosts"]
    assert "lacks shm" in host_report(open_host)["same host"]
    assert host_report(TransferOptions(transports=("shm",)))["other hosts"].startswith("none")


@pytest.mark.skipif(load_ucx() is None, reason="there is no libucp: pip install moonpool[ucx]")
def test_ucx_is_named_with_its_version_and_what_it_lacks() -> None:
    ucx = load_ucx()
    assert ucx is not None
    report = host_report(TransferOptions(transports=("ucx", "tcp")))
    assert ucx.path in report["UCX"]
    assert ".".join(map(str, ucx.version)) in report["UCX"]
    assert report["other hosts"].startswith("ucx")


def test_devices_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rdma = write(
        tmp_path / "infiniband",
        {
            "mlx5_0/ports/1/state": "4: ACTIVE",
            "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "mlx5_0/device/numa_node": "1",
            "mlx5_1/ports/1/state": "1: DOWN",
        },
    )
    net = write(
        tmp_path / "net",
        {
            "lo/operstate": "unknown",
            "eth0/operstate": "up",
            "eth0/speed": "25000",
            "eth0/device/numa_node": "0",
            "eth1/operstate": "down",
            "eth1/speed": "-1",
        },
    )
    found = rdma_devices(rdma)
    assert found == [
        RdmaDevice("mlx5_0", True, "400 Gb/sec (4X NDR)", 1),
        RdmaDevice("mlx5_1", False, "", -1),
    ]
    assert interfaces(net) == [Interface("eth0", True, 25000, 0), Interface("eth1", False, 0, -1)]
    monkeypatch.setattr(report_module, "rdma_devices", lambda: found)
    assert "lacks ucx" in host_report(TransferOptions())["other hosts"]
    assert "NUMA node 1" in host_report(TransferOptions())["RDMA"]
    assert rdma_devices(tmp_path / "none") == []
