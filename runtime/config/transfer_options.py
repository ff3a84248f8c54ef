"""Options of the transfer agent."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.section import Section, option, require, section


@dataclass(frozen=True, slots=True)
class TcpOptions(Section, name="transfer.tcp"):
    streams: int = option(
        2,
        "connections",
        "parallel connections to each address of a peer; an agent serves 1,024 at most, then ends idle ones",
        least=1,
        most=64,
    )
    slice_nbytes: int = option(4 << 20, "bytes", "most bytes of one send call", least=4096)
    host: str = option("127.0.0.1", "address", "address to listen on and to announce")
    rails: tuple[str, ...] = option(
        (), "addresses", "further interfaces (at most 16); batches are spread over them by their speed"
    )

    def _check(self) -> None:
        require(len(self.rails) <= 16, "transfer.tcp.rails", "at most 16 addresses", len(self.rails))


@dataclass(frozen=True, slots=True)
class TransferOptions(Section, name="transfer"):
    transports: tuple[str, ...] = option(
        ("local", "cuda-ipc", "shm", "tcp"),
        "names",
        "transports to offer, best first",
        choices=("local", "cuda-ipc", "shm", "tcp", "ucx"),
    )
    checksum: bool = option(True, "flag", "verify the checksum of every block that arrives")
    deadline_s: float = option(10.0, "seconds", "longest a batch may take", above=0)
    read_nbytes_per_s: int = option(
        0, "bytes/second", "most that a node with an engine reads from its peers; 0: no limit", least=0
    )
    tcp: TcpOptions = section(TcpOptions)
