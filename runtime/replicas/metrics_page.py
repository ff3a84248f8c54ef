"""The /metrics page of a node of several replicas: all of theirs in one, told apart by a label."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.replicas.supervisor import ReplicaProcess

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


class ReplicaMetrics(Collector):
    """Asks each replica at every scrape; one that does not answer is left out."""

    def __init__(self, host: str, port: int) -> None:
        """Serve the page. Raises PortInUse."""
        self.replicas: Sequence[ReplicaProcess] = ()
        registry = CollectorRegistry()
        registry.register(self)
        self.url = f"http://{host}:{serve_metrics(host, port, registry)}/metrics"

    def collect(self) -> Iterator[Metric]:
        """Each replica's samples with its number as the label ``replica``, family by family."""
        serving = {one.number: str(one.facts["metrics_url"]) for one in self.replicas if one.facts}
        yield GaugeMetricFamily("moonpool_replicas", "Replicas this node is made of", len(self.replicas))
        yield GaugeMetricFamily("moonpool_replicas_ready", "Of those, the ones that serve", len(serving))
        lives = CounterMetricFamily("moonpool_replica_lives", "Times it was started", labels=["replica"])
        for one in self.replicas:
            lives.add_metric([str(one.number)], one.num_lives)
        yield lives
        with ThreadPoolExecutor(max(len(serving), 1)) as threads:
            pages = dict(zip(serving, threads.map(_read, serving.values()), strict=True))
        yield from merged(pages)


def merged(pages: dict[int, str]) -> Iterator[Metric]:
    """The pages by replica as one: a family stands there once, with the samples of all."""
    families: dict[str, Metric] = {}
    for number, page in pages.items():
        for family in text_string_to_metric_families(page):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [
                sample._replace(labels={**sample.labels, "replica": str(number)}) for sample in family.samples
            ]
    yield from families.values()


def _read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError as error:
        log.warning("a replica's metrics at %s are left out: %s", url, error)
        return ""
