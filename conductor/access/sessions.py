"""Sessions of browsers: an API key exchanged for a signed cookie, valid at every conductor of the cluster."""

from __future__ import annotations

import hmac
import time
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable
from hashlib import blake2b

LASTS_S = 12 * 3600
# 54 bytes in all: base64 writes them without padding, in one way only.
_ID_NBYTES, _TIME_NBYTES, _MAC_NBYTES = 16, 8, 30
_MAX_CHARS = 128


class Sessions:
    """Nothing is stored: a cookie is the id of a key (``ApiKeys.id_of``), its end, and a MAC over both.

    A session ends with its time, at sign-out, or when its key is removed from the file of keys.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """``secret``: 32 bytes, the same at all conductors of a cluster. ``clock``: wall time."""
        self._secret = secret
        self._clock = clock

    def begin(self, key_id: bytes) -> str:
        """Return the cookie of a new session of the key."""
        payload = key_id + int(self._clock() + LASTS_S).to_bytes(_TIME_NBYTES, "big")
        return urlsafe_b64encode(payload + self._mac(payload)).decode()

    def key_of(self, cookie: str) -> bytes | None:
        """Return the id of the key that began a session; None: the cookie is not ours, or too old."""
        try:
            data = b64decode(cookie[:_MAX_CHARS].encode(), b"-_", validate=True)
        except ValueError:
            return None
        payload, mac = data[:-_MAC_NBYTES], data[-_MAC_NBYTES:]
        if len(payload) != _ID_NBYTES + _TIME_NBYTES or not hmac.compare_digest(mac, self._mac(payload)):
            return None
        ends_s = int.from_bytes(payload[_ID_NBYTES:], "big")
        return payload[:_ID_NBYTES] if self._clock() < ends_s else None

    def _mac(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._secret, digest_size=_MAC_NBYTES).digest()
