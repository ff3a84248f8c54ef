"""What is counted, read back as a scrape would."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import ChecksumMismatch, Span, TransferAgent, checksum

NBYTES = 2 << 20


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"moonpool_transfer_{name}", labels) or 0.0


async def test_a_batch_is_counted_by_path_and_direction() -> None:
    options = TransferOptions(transports=("tcp",))
    async with (
        await TransferAgent.start(options, agent_id="here", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="peer", epoch=1) as theirs,
    ):
        ours, remote = agent.allocate(NBYTES, "ours"), theirs.allocate(NBYTES, "theirs")
        peer = await agent.connect(theirs.describe())
        spans = (
            [Span(ours.id, 0, NBYTES // 2), Span(ours.id, NBYTES // 2, NBYTES // 2)],
            [Span(remote.id, 0, NBYTES // 2), Span(remote.id, NBYTES // 2, NBYTES // 2)],
        )
        of = {"path": "tcp", "direction": "read"}
        names = ("bytes_total", "spans_total", "batch_seconds_count", "batch_seconds_sum")
        before = [sample(name, **of) for name in names]
        mismatches = sample("checksum_mismatches_total", direction="read")
        failures = sample("failures_total", direction="read", cause="ChecksumMismatch")
        report = await peer.read(*spans, deadline_s=10)
        nbytes, count, batches, seconds = (
            after - earlier
            for after, earlier in zip([sample(name, **of) for name in names], before, strict=True)
        )
        assert (nbytes, count, batches) == (NBYTES, 2, 1)
        assert seconds == pytest.approx(report.seconds)
        assert sample("bandwidth_bytes_per_second", **of) > 0
        assert peer.bandwidth["tcp"] > 0
        assert agent.bandwidth() == {"peer": peer.bandwidth["tcp"]}
        # The other side has moved nothing.
        assert theirs.bandwidth() == {}
        wrong = [checksum(bytes(NBYTES // 2)), 1]
        with pytest.raises(ChecksumMismatch):
            await peer.read(*spans, deadline_s=10, checksums=wrong)
        assert sample("checksum_mismatches_total", direction="read") == mismatches + 1
        assert sample("failures_total", direction="read", cause="ChecksumMismatch") == failures + 1
        assert sample("in_flight_bytes", direction="read") == 0
