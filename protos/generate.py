"""``python -m moonpool.protos.generate [--check]``: generate Python code from the .proto files here."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# The folder under its import name, a link.
PACKAGE = ROOT / "moonpool" / "protos"


def generate(target: Path) -> list[Path]:
    """Write ``target/moonpool/protos/*_pb2*`` and return the paths."""
    from grpc_tools import protoc  # a development dependency

    sources = sorted(PACKAGE.glob("*.proto"))
    # With the repository root as the include path the generated imports read `from moonpool.protos import
    # x_pb2`.
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out={target}",
        f"--mypy_grpc_out={target}",
        *(str(source) for source in sources),
    ]
    # protoc looks for its plugins on PATH, and the environment need not be activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed, see above")
    return sorted(path for path in (target / "moonpool" / "protos").glob("*_pb2*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code is stale")
    if not parser.parse_args().check:
        for path in generate(ROOT):
            print(path.relative_to(ROOT))
        return
    with tempfile.TemporaryDirectory() as directory:
        fresh = {path.name: path.read_text() for path in generate(Path(directory))}
    committed = {path.name: path.read_text() for path in HERE.glob("*_pb2*") if path.is_file()}
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if stale:
        raise SystemExit(f"protos: {', '.join(stale)} do not match their .proto; run `make protos`")
    print("protos: the generated code is up to date")


if __name__ == "__main__":
    main()
