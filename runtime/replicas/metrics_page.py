"""The /metrics page of a node of several replicas; the label ``replica`` distinguishes their samples."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.observing.metrics_server import metrics_headers, serve_metrics
from moonpool.runtime.replicas.supervisor import ReplicaProcess
from moonpool.runtime.security import process

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
GROUP_TIMEOUT_S = 2 * _TIMEOUT_S
"""For a reader of the page of the whole group, which reads the others."""


class ReplicaMetrics(Collector):
    """Fetches the pages of all replicas at every scrape; a replica that does not answer is omitted."""

    def __init__(self, host: str, port: int, *, keyed: bool = False) -> None:
        """Serve the page (see ``serve_metrics``). Raises PortInUse, ConfigError."""
        self.replicas: Sequence[ReplicaProcess] = ()
        registry = CollectorRegistry()
        registry.register(self)
        self.url = f"http://{host_port(host, serve_metrics(host, port, registry, keyed=keyed).port)}/metrics"

    def collect(self) -> Iterator[Metric]:
        """Each replica's samples with its number as the label ``replica``, family by family."""
        serving = {one.number: str(one.facts["metrics_url"]) for one in self.replicas if one.facts}
        yield GaugeMetricFamily(
            "moonpool_replicas", "Replicas of this node, or workers of this conductor", len(self.replicas)
        )
        yield GaugeMetricFamily("moonpool_replicas_ready", "Those of them that are ready", len(serving))
        starts = CounterMetricFamily(
            "moonpool_replica_starts", "Times the replica was started", labels=["replica"]
        )
        for one in self.replicas:
            starts.add_metric([str(one.number)], one.num_starts)
        yield starts
        with ThreadPoolExecutor(max(len(serving), 1)) as threads:
            pages = dict(zip(serving, threads.map(_read, serving.values()), strict=True))
        yield from merged(pages)


def merged(pages: dict[int, str]) -> Iterator[Metric]:
    """Merge the pages (by replica number): one family per metric, with the samples of all replicas."""
    families: dict[str, Metric] = {}
    for number, page in pages.items():
        for family in text_string_to_metric_families(page):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [
                sample._replace(labels={**sample.labels, "replica": str(number)}) for sample in family.samples
            ]
    yield from families.values()


def read_page(url: str, timeout_s: float) -> str:
    """A metrics page of a process of this cluster. Raises OSError."""
    request = urllib.request.Request(url, headers=metrics_headers(process.current()))
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return str(answer.read().decode())


def _read(url: str) -> str:
    try:
        return read_page(url, _TIMEOUT_S)
    except OSError as error:
        log.warning("metrics of the replica at %s are omitted: %s", url, error)
        return ""
