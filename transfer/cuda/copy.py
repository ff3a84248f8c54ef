"""Moving the bytes of a hold, wherever they lie: what is device memory goes through a staging."""

from __future__ import annotations

from collections.abc import Callable

from transfer.byte_stream import ByteStream
from transfer.copy_job import Copy
from transfer.region import Hold
from transfer.span import U64


def direct_copy(hold: Hold) -> Copy:
    """Between addresses that the device of ``hold`` reaches: its own, other devices', this process's."""

    def copy(to: U64, source: U64, nbytes: U64, wanted: Callable[[], bool]) -> bool:
        with hold.staging() as staging:
            return staging.copy(to, source, nbytes, wanted)

    return copy


def bounced(hold: Hold, fetch: Copy) -> Copy:
    """``fetch``, from where only it reaches, to memory of ``hold``."""
    if hold.device is None:
        return fetch

    def copy(to: U64, source: U64, nbytes: U64, wanted: Callable[[], bool]) -> bool:
        def fill(slot: U64, there: U64, sizes: U64) -> bool:
            return fetch(slot, there, sizes, wanted)

        with hold.staging() as staging:
            return staging.bring(to, source, nbytes, fill)

    return copy


def send(stream: ByteStream, head: bytes, hold: Hold, address: U64, nbytes: U64) -> None:
    """``head``, then the runs of memory of ``hold``. Raises OSError."""
    if hold.device is None:
        stream.send(head, address, nbytes)
        return

    def empty(slot: U64, _: U64, sizes: U64) -> bool:
        nonlocal head
        stream.send(head, slot[:1], sizes.sum(keepdims=True))
        head = b""
        return True

    with hold.staging() as staging:
        staging.take(address, address, nbytes, empty)


def receive(
    stream: ByteStream, hold: Hold, address: U64, nbytes: U64, wanted: Callable[[], bool] = lambda: True
) -> None:
    """Fill the runs of memory of ``hold``. Raises OSError, also when it is not ``wanted()`` any more."""
    if hold.device is None:
        stream.receive_into(address, nbytes, wanted)
        return

    def fill(slot: U64, _: U64, sizes: U64) -> bool:
        stream.receive_into(slot[:1], sizes.sum(keepdims=True), wanted)
        return True

    with hold.staging() as staging:
        staging.bring(address, address, nbytes, fill)
