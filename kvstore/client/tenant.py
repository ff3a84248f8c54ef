"""Object keys that only their tenant can compute: a digest of owner, salt and name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.client.errors import BadObject

MOST_NAME_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Tenant:
    """Objects are isolated by ``name`` and ``salt``: without both they cannot be found, listed, read or
    removed. The salt is the secret."""

    name: str = ""
    salt: str = ""

    @property
    def owner(self) -> bytes:
        """16 bytes that nodes compare; they do not reveal the keys."""
        return self._digest(b"moonpool-owner")

    def key(self, name: str) -> bytes:
        """16 bytes. Raises ``BadObject``: the name is empty or longer than 4,096 bytes."""
        data = name.encode()
        if not 0 < len(data) <= MOST_NAME_NBYTES:
            raise BadObject(f"an object's name has 1 to {MOST_NAME_NBYTES} bytes, not {len(data)}")
        root = self._digest(b"moonpool-object")
        return blake2b(root + data, digest_size=KEY_NBYTES).digest()

    def _digest(self, purpose: bytes) -> bytes:
        return _digest(self.name, self.salt, purpose)


@lru_cache(maxsize=64)
def _digest(name: str, salt: str, purpose: bytes) -> bytes:
    digest = blake2b(digest_size=KEY_NBYTES, person=purpose)
    for part in (name.encode(), salt.encode()):
        # Prefixed by its length, so that different pairs give different bytes.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
