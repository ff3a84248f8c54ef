"""Copies from and to the regions of a hold; device memory is copied through a staging."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from moonpool.transfer.connections.byte_stream import ByteStream
from moonpool.transfer.copying.memcpy import Copy
from moonpool.transfer.memory.region import Hold
from moonpool.transfer.memory.staging import Staging
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.compiled_copy import Stop


def direct_copy(borrow: Callable[[], AbstractContextManager[Staging]]) -> Copy:
    """A copy between addresses that a device can access: its own, other devices', this process's."""

    def copy(to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None) -> bool:
        with borrow() as staging:
            whole = staging.copy(to, source, nbytes, lambda: not stop[0])
            if whole and digests is not None:
                digests[:] = staging.checksums(to, nbytes)
            return whole

    return copy


def through_staging(hold: Hold, fetch: Copy) -> Copy:
    """``fetch`` to memory of ``hold``, on a device or not."""
    if hold.device is None:
        return fetch

    def copy(to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None) -> bool:
        def fill(slot: U64, there: U64, sizes: U64) -> bool:
            return fetch(slot, there, sizes, stop, None)

        with hold.staging() as staging:
            whole = staging.upload(to, source, nbytes, fill)
            if whole and digests is not None:
                digests[:] = staging.checksums(to, nbytes)
            return whole

    return copy


def send(stream: ByteStream, head: bytes, hold: Hold, address: U64, nbytes: U64) -> None:
    """Send ``head``, then runs of memory of ``hold``. Raises OSError."""
    if hold.device is None:
        stream.send(head, address, nbytes)
        return

    def empty(slot: U64, _: U64, sizes: U64) -> bool:
        nonlocal head
        stream.send(head, slot[:1], sizes.sum(keepdims=True))
        head = b""
        return True

    with hold.staging() as staging:
        staging.download(address, address, nbytes, empty)


def receive(
    stream: ByteStream, hold: Hold, address: U64, nbytes: U64, wanted: Callable[[], bool] = lambda: True
) -> None:
    """Receive into runs of memory of ``hold``. Raises OSError, also when not ``wanted()`` any more."""
    if hold.device is None:
        stream.receive_into(address, nbytes, wanted)
        return

    def fill(slot: U64, _: U64, sizes: U64) -> bool:
        stream.receive_into(slot[:1], sizes.sum(keepdims=True), wanted)
        return True

    with hold.staging() as staging:
        staging.upload(address, address, nbytes, fill)
