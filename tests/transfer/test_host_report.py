"""What ``moonpool doctor`` says of this host, and what it would say of others."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.runtime.config.options import TcpOptions, TransferOptions
from moonpool.transfer import TransferAgent
from moonpool.transfer import host_report as report_module
from moonpool.transfer.host_report import host_report
from moonpool.transfer.native import ucx as ucx_module
from moonpool.transfer.native.cuda import load_cuda
from moonpool.transfer.native.ucx import Ucx, load_ucx
from moonpool.transfer.paths.ucx.topology import (
    Interface,
    RdmaDevice,
    interfaces,
    num_rdma_rails,
    rdma_devices,
)
from tests.transfer.device import use_stand_in


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


def test_how_device_memory_goes_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert "by cuda-ipc" in host_report(TransferOptions())["CUDA"]
    assert "lacks cuda-ipc" in host_report(TransferOptions(transports=("shm", "tcp")))["CUDA"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,expandable_segments:True")
    assert "expandable segments" in host_report(TransferOptions())["CUDA"]
    monkeypatch.setenv("MOONPOOL_CUDART", "/nowhere/libcudart.so.13")
    load_cuda.cache_clear()
    assert "/nowhere/libcudart.so.13" in host_report(TransferOptions())["CUDA"]


@pytest.mark.skipif(load_ucx() is None, reason="there is no libucp: pip install moonpool[ucx]")
def test_ucx_is_named_with_its_version_and_what_it_lacks() -> None:
    ucx = load_ucx()
    assert ucx is not None
    report = host_report(TransferOptions(transports=("ucx", "tcp")))
    assert ucx.path in report["UCX"]
    assert ".".join(map(str, ucx.version)) in report["UCX"]
    assert report["other hosts"].startswith("ucx")
    # The tests install the wheel; a system's libucp is taken only for its verbs.
    assert ("the wheel's, without verbs" in report["UCX"]) == ("libucx" in ucx.path)


def test_a_libucp_too_old_to_have_every_function_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    root = write(
        tmp_path,
        {
            "old.c": "void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) "
            "{ *major = 1; *minor = 8; *release = 0; }"
        },
    )
    old = root / "libucp.so.0"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(old), str(root / "old.c")], check=True)
    monkeypatch.setattr(ucx_module, "_candidates", lambda: [old])
    # Not the cached one, which other tests need.
    load = load_ucx.__wrapped__
    assert load() is None
    monkeypatch.setattr(report_module, "load_ucx", load)
    assert host_report(TransferOptions())["UCX"].startswith("no libucp")


def test_libucp_is_found_beside_files_and_folders_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unusable = "/" + 300 * "x"
    root = tmp_path.resolve()
    write(root, {"lib/libucp.so.0": "", "conf/b.conf": f"{unusable}\n{root / 'lib'}"})
    (root / "conf/a.conf").symlink_to(root / "gone")
    monkeypatch.setattr(ucx_module, "_LOADER_CONFIGURATION", root / "conf")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert ucx_module._system_library() == root / "lib/libucp.so.0"


def test_devices_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rdma = write(
        tmp_path / "infiniband",
        {
            "mlx5_0/ports/1/state": "4: ACTIVE",
            "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "mlx5_0/device/numa_node": "1",
            "mlx5_1/ports/1/state": "1: DOWN",
            "mlx5_2/ports/1/state": "4: ACTIVE",
            "mlx5_2/device/numa_node": "0",
        },
    )
    nodes = write(
        tmp_path / "node",
        {
            "node0/cpulist": "0-511",
            "node0/distance": "10 21",
            "node1/cpulist": "512-600,700",
            "node1/distance": "21 10",
            "power/runtime": "",
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
    found = rdma_devices(rdma, nodes)
    assert found == [
        RdmaDevice("mlx5_1", False, "", -1, 0),
        RdmaDevice("mlx5_2", True, "", 0, 10),
        RdmaDevice("mlx5_0", True, "400 Gb/sec (4X NDR)", 1, 21),
    ]
    assert num_rdma_rails(found) == 1
    assert num_rdma_rails([*found, RdmaDevice("mlx5_3", True, "", 0, 10)]) == 2
    assert num_rdma_rails(found[:1]) == num_rdma_rails([]) == 0
    ethernet = [Interface("eth0", True, 25000, 0, 10), Interface("eth1", False, 0, -1, 0)]
    assert interfaces(net, nodes) == ethernet
    monkeypatch.setattr(report_module, "rdma_devices", lambda: found)
    assert "lacks ucx" in host_report(TransferOptions())["other hosts"]
    assert "NUMA node 1 at distance 21" in host_report(TransferOptions())["RDMA"]
    ucx = Ucx(None, None, (1, 20, 0), "/usr/lib/libucp.so.0", True, ("cma", "ib"), from_wheel=False)  # type: ignore[arg-type]
    monkeypatch.setattr(report_module, "load_ucx", lambda: ucx)
    report = host_report(TransferOptions(transports=("ucx", "tcp")))
    assert report["other hosts"] == "ucx: RDMA by mlx5_2 (the nearest of 2), then tcp"
    assert report["UCX"].startswith("1.20.0, the system's, with verbs, at /usr/lib/libucp.so.0")
    monkeypatch.setattr(report_module, "interfaces", lambda: [ethernet[0], replace(ethernet[1], up=True)])
    assert "eth0, eth1 are up" in host_report(TransferOptions())["other hosts"]
    railed = TransferOptions(tcp=TcpOptions(host="10.0.0.1", rails=("10.1.0.1",)))
    assert "spread over it and 10.1.0.1" in host_report(railed)["other hosts"]
    assert rdma_devices(tmp_path / "none") == []


@pytest.mark.parametrize("transports", [("shm",), ("shm", "ucx"), ("tcp",)])
@pytest.mark.parametrize("form", ["compiled", "plain"])
async def test_pools_are_what_is_said_of_them(
    monkeypatch: pytest.MonkeyPatch, fresh_compiled_copy: None, transports: tuple[str, ...], form: str
) -> None:
    monkeypatch.setenv("MOONPOOL_TRANSFER", form)
    options = TransferOptions(transports=transports)
    async with await TransferAgent.start(options, agent_id="here", epoch=1) as agent:
        backing = agent.allocate(4096, "pool").backing
    said = host_report(options)["pool memory"]
    assert backing == ("memfd" if "memfd" in said else "anonymous")
    if form == "plain" or "shm" not in transports:
        assert backing == "anonymous"
