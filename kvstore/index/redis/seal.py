"""Seals on what processes of a cluster write to Redis: ``mac | life u64 | number u64 | body``.

``mac`` is BLAKE2b under a key derived from the cluster's, over the entry's kind, the Redis key and field that
it was written for, the epoch, life, number and body. Only processes with the cluster's key can make an entry,
and one that was written for another place, node, namespace or epoch is no entry here. ``life`` tells
registrations of an epoch apart, ``number`` grows within a life: readers that remember them notice an older
entry.

Not protected: what is deleted or withheld, and what Redis itself counts (lease scores, ``base``, ``seq``).
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from moonpool.kvstore.errors import EntryRefused
from moonpool.runtime.security import process

MAC_NBYTES: Final = 16
_NUMBERS = Struct("<QQ")
_START = MAC_NBYTES + _NUMBERS.size
_PLACE = Struct("<cIQ")  # kind, length of the place's name, epoch


def key_of_cluster(purpose: str) -> bytes:
    """32 secret bytes for what is in Redis; everybody's where ``security.insecure`` says so.

    Raises ``ConfigError``: this process has the key of one role only.
    """
    security = process.current()
    is_open = security.options.insecure and not security.has_key
    return bytes(32) if is_open else security.derived_key(purpose)


class Sealed(NamedTuple):
    """An entry as it was written."""

    life: int
    number: int
    body: bytes


class Seals:
    """The seals of one cluster. Raises ``ConfigError``: this process has the key of one role only."""

    def __init__(self, key: bytes | None = None) -> None:
        """``key``: 32 bytes; None: this process's (see ``security.process``), or everybody's where
        ``security.insecure`` says so."""
        security = process.current()
        key = key or key_of_cluster("index in Redis")
        self._hint = "" if security.has_key else " (none is set: every machine has one of its own)"
        self._keyed = blake2b(key=key, digest_size=MAC_NBYTES)

    def seal(
        self, kind: bytes, place: bytes, body: bytes, *, epoch: int = 0, life: int = 0, number: int = 0
    ) -> bytes:
        """``kind``: one byte. ``place``: the Redis key, and the field. The numbers have 64 bits."""
        numbers = _NUMBERS.pack(life, number)
        return self._mac(kind, place, epoch, numbers, body) + numbers + body

    def open(self, kind: bytes, place: bytes, data: bytes, *, epoch: int = 0) -> Sealed:
        """Raises ``EntryRefused``: it was not written for this place with the cluster's key."""
        numbers, body = data[MAC_NBYTES:_START], data[_START:]
        try:
            mac = self._mac(kind, place, epoch, numbers, body)
            life, number = _NUMBERS.unpack(numbers)
        except StructError:
            pass  # too short, or not a number of an entry
        else:
            if compare_digest(mac, data[:MAC_NBYTES]):
                return Sealed(life, number, body)
        raise EntryRefused(
            "forged",
            f"no process with our security.cluster_key{self._hint} wrote it for this place: {data[:64]!r}",
        )

    def _mac(self, kind: bytes, place: bytes, epoch: int, numbers: bytes, body: bytes) -> bytes:
        mac = self._keyed.copy()
        mac.update(_PLACE.pack(kind, len(place), epoch) + place + numbers)
        mac.update(body)
        return mac.digest()
