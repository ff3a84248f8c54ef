"""Names that only their tenant can make: an object's key is a digest of who owns it, a salt, and its name."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.client.errors import BadObject

_MOST_NAME_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who else gives the same ``name`` and ``salt`` shares the objects; nobody else can name, list or remove
    one. So the salt is what must not be known to others."""

    name: str = ""
    salt: str = ""

    @property
    def owner(self) -> bytes:
        """16 bytes that nodes compare. They do not tell the root of the keys."""
        return self._digest(b"moonpool-owner")

    def key(self, name: str) -> bytes:
        """16 bytes. Raises ``BadObject`` for a name that is empty or longer than 4,096 bytes."""
        data = name.encode()
        if not 0 < len(data) <= _MOST_NAME_NBYTES:
            raise BadObject(f"an object's name has 1 to {_MOST_NAME_NBYTES} bytes, not {len(data)}")
        root = self._digest(b"moonpool-object")
        return blake2b(root + data, digest_size=KEY_NBYTES).digest()

    def _digest(self, purpose: bytes) -> bytes:
        digest = blake2b(digest_size=KEY_NBYTES, person=purpose)
        for part in (self.name.encode(), self.salt.encode()):
            # Each part is led by its length, so that no two different pairs give the same bytes.
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()
