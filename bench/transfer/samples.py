"""One case: everybody moves the same blocks in turn, round after round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.bench.transfer.batch_shape import Shape
from moonpool.bench.transfer.goals import OF_LIMIT, OF_PEER, SPANS_PER_S
from moonpool.bench.transfer.peers.contestant import Contestant
from moonpool.runtime.reports.report import Row

TURN_S = 0.1
"""Each begins with a pass that does not count: the caches are those of whoever came before."""


@dataclass(slots=True)
class Samples:
    """seconds of each time all blocks were moved; processor seconds of all passes, both processes."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    uncounted: int = 0

    def gb_per_s(self, nbytes: int) -> float:
        """Of the median."""
        return nbytes / statistics.median(self.seconds) / 1e9

    def cpu_s_per_gb(self, nbytes: int) -> float:
        return self.cpu_s / (nbytes * (len(self.seconds) + self.uncounted)) * 1e9


async def take_turns(
    shape: Shape,
    limit: Callable[[], float],
    limit_name: str,
    contestants: Sequence[Contestant],
    rounds: int,
) -> tuple[Samples, list[Samples]]:
    """Of the limit, and of each contestant."""
    for contestant in contestants:
        await contestant.prepare(shape)
    of_limit, of_each = Samples(limit_name), [Samples(contestant.name) for contestant in contestants]
    for _ in range(rounds):
        limit()
        until = time.perf_counter() + TURN_S
        while True:
            of_limit.seconds.append(limit())
            if time.perf_counter() > until:
                break
        for contestant, samples in zip(contestants, of_each, strict=True):
            used = contestant.cpu_seconds()
            samples.seconds += await contestant.move(TURN_S)
            samples.uncounted += 1
            samples.cpu_s += contestant.cpu_seconds() - used
    return of_limit, of_each


def rows_of(
    transport: str, shape: Shape, checksums: bool, ours: Samples, limit: Samples, peers: Sequence[Samples]
) -> list[Row]:
    """Our figures beside the limit; and, where bytes are moved as they do, without checksums, the peers'."""
    case = f"{transport}/{shape.name}/checksum-{'on' if checksums else 'off'}"
    seconds = sorted(ours.seconds)
    median = statistics.median(seconds)
    reach = OF_LIMIT.get((transport, shape.name), (None, None))[checksums]
    rows = [_bandwidth(case, shape, ours, limit, reach)]
    for peer in () if checksums else peers:
        times = OF_PEER.get((transport, shape.name, peer.name))
        rows.append(_bandwidth(case, shape, ours, peer, times))
    p99 = seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e6
    rows.append(Row(case, "latency", median * 1e6, "µs", p50=median * 1e6, p99=p99))
    floor = SPANS_PER_S.get((transport, shape.name))
    bound = "at least" if floor else None
    rate = shape.batch * shape.parallel / median
    rows.append(Row(case, "spans", rate, "spans/s", limit=bound, limit_value=floor))
    cpu_s = ours.cpu_s_per_gb(shape.nbytes)
    rows.append(Row(case, "processor time", cpu_s, "s/GB"))
    for peer in () if checksums else peers:
        theirs = peer.cpu_s_per_gb(shape.nbytes)
        if theirs > 0:
            ratio = cpu_s / theirs
            rows.append(
                Row(case, "processor time", cpu_s, "s/GB", peer=peer.name, peer_value=theirs, ratio=ratio)
            )
    return rows


def _bandwidth(case: str, shape: Shape, ours: Samples, other: Samples, reach: float | None) -> Row:
    value, others = ours.gb_per_s(shape.nbytes), other.gb_per_s(shape.nbytes)
    return Row(
        case=case,
        metric="bandwidth",
        value=value,
        unit="GB/s",
        limit="at least" if reach else None,
        limit_value=reach,
        ratio=value / others,
        peer=other.name,
        peer_value=others,
    )
