"""What lies between regions, as configured: latency, bandwidth and the price of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moonpool.runtime.errors import ConfigError

_KEY = "conductor.region_links"
_FIGURES = ("rtt_ms", "gbit_s", "price_gb")


@dataclass(frozen=True, slots=True)
class RegionLink:
    """``price``: of a byte, in the currency of ``model.price``."""

    rtt_s: float = 0.0
    nbytes_per_s: float = math.inf  # infinite: as within a region
    price: float = 0.0


NEAR = RegionLink()


class RegionLinks:
    """Links by their two regions, in either direction. Immutable.

    Within a region, for places without one, and between regions without a link, nothing is added.

    Money becomes time at one rate: a second that requests wait is worth the price of a second of a node,
    because a node of more is what money could buy instead.
    """

    def __init__(
        self, links: Mapping[frozenset[str], RegionLink] | None = None, *, node_price: float = 1.0
    ) -> None:
        """``node_price``: of a second of a node; 0: bytes have no price."""
        self._links = dict(links or {})
        self._node_price = node_price

    @classmethod
    def parse(cls, texts: Iterable[str], *, node_price: float = 1.0) -> RegionLinks:
        """Read ``A:B [rtt_ms=MS] [gbit_s=RATE] [price_gb=MONEY]`` each. Raises ``ConfigError``."""
        links: dict[frozenset[str], RegionLink] = {}
        for text in texts:
            names, *facts = text.split() or [""]
            ends = names.split(":")
            given = dict(fact.partition("=")[::2] for fact in facts)
            if len(ends) != 2 or not all(ends) or ends[0] == ends[1] or given.keys() - set(_FIGURES):
                raise _wrong(text)
            figures = {name: _figure(text, value) for name, value in given.items()}
            rate = figures.get("gbit_s", math.inf)
            if not rate or frozenset(ends) in links:
                raise _wrong(text)
            links[frozenset(ends)] = RegionLink(
                figures.get("rtt_ms", 0.0) / 1e3, rate * 1e9 / 8, figures.get("price_gb", 0.0) / 1e9
            )
        return cls(links, node_price=node_price)

    def __bool__(self) -> bool:
        return bool(self._links)

    def between(self, one: str, other: str) -> RegionLink:
        return self._links.get(frozenset((one, other)), NEAR)

    def egress_s(self, one: str, other: str, nbytes: float) -> float:
        """The price of ``nbytes`` between two regions, as seconds."""
        return nbytes * self.between(one, other).price / self._node_price if self._node_price else 0.0


def _figure(text: str, value: str) -> float:
    try:
        figure = float(value)
    except ValueError:
        raise _wrong(text) from None
    if not 0 <= figure < math.inf:
        raise _wrong(text)
    return figure


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"{_KEY}: {text!r} is not A:B [rtt_ms=MS] [gbit_s=RATE] [price_gb=MONEY], with two regions that no "
        "other entry has, and figures of 0 or more",
        _KEY,
    )
