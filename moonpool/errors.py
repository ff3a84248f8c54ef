"""What can keep a cluster on this machine from starting or going on."""

from __future__ import annotations

from pathlib import Path

from moonpool.runtime.errors import MoonpoolError


class LocalClusterError(MoonpoolError):
    """Root of this package's errors. The cluster has been, or will now be, stopped."""


class RedisMissing(LocalClusterError):
    """No Redis server binary on this machine. Nothing has been started."""

    def __init__(self) -> None:
        super().__init__(
            "no redis-server was found: install one (Debian, Ubuntu: apt install redis-server) or name a "
            "running one with --redis redis://HOST:PORT"
        )


class TooLittleMemory(LocalClusterError):
    """The nodes' pools do not fit in this machine's memory. Nothing has been started."""

    def __init__(self, needed_nbytes: int, available_nbytes: int) -> None:
        super().__init__(
            f"the nodes' pools need {needed_nbytes / 2**30:.1f} GiB of memory and "
            f"{available_nbytes / 2**30:.1f} GiB are free: start fewer nodes (--prefill 1 --decode 1) or "
            "smaller pools (--set engine.pool_nbytes=128MiB)"
        )


class ModelMissing(LocalClusterError):
    """The checkpoint directory is not one. Nothing has been started."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(
            f"{directory} {reason}: name a Hugging Face checkpoint directory (config.json, tokenizer.json, "
            "*.safetensors) with --model"
        )
        self.directory = directory


class IndexUnreachable(LocalClusterError):
    """The Redis somebody named does not answer. Nothing has been started."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"the Redis at {url} does not answer ({reason}): start it, or leave out --redis")


class ReportSourceInvalid(MoonpoolError):
    """A file that is to go into a report is not what ``moonpool bench … --json`` writes."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is no report of `moonpool bench … --json`: {what}")
        self.path = path


class ApiError(LocalClusterError):
    """The API answered with an error, or could not be reached (``status`` 0)."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url}: {message}" if status == 0 else f"{url} answered {status}: {message}")
        self.url = url
        self.status = status
