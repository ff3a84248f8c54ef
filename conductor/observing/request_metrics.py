"""Prometheus metrics of requests, under our names and under vLLM's."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.slo import Slo
from moonpool.kvstore.eviction.tenant_metrics import TenantLabels
from moonpool.kvstore.index.redis.node_record import ROLES

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
_GAPS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_STAGES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
_TOKENS = tuple(float(2**power) for power in range(18))

# Tenants with series of their own: as many as a day's usage names. Later ones are "other".
MOST_TENANTS = 1000
_MOST_EXEMPLAR_CHARS = 128  # of names and values together, in OpenMetrics

# Our name -> vLLM's name of the same metric.
VLLM_NAMES = {
    "moonpool_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "moonpool_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "moonpool_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "moonpool_request_seconds": "vllm:e2e_request_latency_seconds",
    "moonpool_request_prompt_tokens": "vllm:request_prompt_tokens",
    "moonpool_request_output_tokens": "vllm:request_generation_tokens",
    "moonpool_running_requests": "vllm:num_requests_running",
    "moonpool_waiting_requests": "vllm:num_requests_waiting",
    "moonpool_kv_pool_usage_ratio": "vllm:kv_cache_usage_perc",
    "moonpool_prompt_tokens": "vllm:prompt_tokens",
    "moonpool_output_tokens": "vllm:generation_tokens",
    "moonpool_prefix_queried_tokens": "vllm:prefix_cache_queries",
    "moonpool_prefix_hit_tokens": "vllm:prefix_cache_hits",
    "moonpool_requests": "vllm:request_success",
}
_VLLM_LABELS = {"finish_reason": "finished_reason"}


@dataclass(slots=True)
class ClusterCounts:
    """The cluster in a few numbers: ``nodes`` by (role, state), blocks of all pools."""

    num_blocks: int = 0
    num_used_blocks: int = 0  # by sequences
    nodes: Counts[tuple[str, str]] = field(default_factory=Counts)
    num_missing_replicas: Counts[str] = field(default_factory=Counts)  # by role
    clock_skew_s: float = 0.0  # the largest of a node's host to ours

    def add(self, other: ClusterCounts) -> None:
        """Add the counts of another model's nodes."""
        self.num_blocks += other.num_blocks
        self.num_used_blocks += other.num_used_blocks
        self.nodes.update(other.nodes)
        self.num_missing_replicas.update(other.num_missing_replicas)
        self.clock_skew_s = max(self.clock_skew_s, other.clock_skew_s)


class _Exported(Collector):
    """The metrics of ``source``, and a second time under vLLM's names, so that nothing is counted twice."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            yield metric
            name = VLLM_NAMES.get(metric.name)
            if name is not None:
                alias = Metric(name, metric.documentation, metric.type)
                alias.samples = [_renamed(sample, metric.name, name) for sample in metric.samples]
                yield alias


def _renamed(sample: Sample, old: str, new: str) -> Sample:
    labels = {_VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
    return sample._replace(name=new + sample.name[len(old) :], labels=labels)


class RequestMetrics:
    """Request-level metrics of one served model. Updated on the event loop; scraped from any thread."""

    def __init__(
        self,
        model: str,
        registry: CollectorRegistry = REGISTRY,
        slo: Slo | None = None,
        beside: RequestMetrics | None = None,
    ) -> None:
        """``slo``: of sequences without one of their own; None: none. ``beside``: the metrics of another
        model, with families that these join."""
        self.registry = registry
        self.slo = slo or Slo()
        self._model = model
        self._own: CollectorRegistry = CollectorRegistry() if beside is None else beside._own
        self._families: dict[str, Any] = {} if beside is None else beside._families
        self._tenants: TenantLabels = TenantLabels(MOST_TENANTS) if beside is None else beside._tenants
        own, families = self._own, self._families

        def family(kind: type[Any], name: str, text: str, labels: Sequence[str], **options: Any) -> Any:
            if name not in families:
                families[name] = kind(name, text, labels, registry=own, **options)
            return families[name]

        def of_model(kind: type[Any], name: str, text: str, **options: Any) -> Any:
            return family(kind, name, text, ["model_name"], **options).labels(model)

        self.ttft: Histogram = of_model(
            Histogram,
            "moonpool_time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_SECONDS,
        )
        self.gap: Histogram = of_model(
            Histogram,
            "moonpool_inter_token_latency_seconds",
            "Between two tokens of a request",
            buckets=_GAPS,
        )
        self.tpot: Histogram = of_model(
            Histogram,
            "moonpool_time_per_output_token_seconds",
            "Mean of a request's tokens after the first",
            buckets=_GAPS,
        )
        self.e2e: Histogram = of_model(
            Histogram, "moonpool_request_seconds", "From arrival to the last token", buckets=_SECONDS
        )
        self.prompt_size: Histogram = of_model(
            Histogram, "moonpool_request_prompt_tokens", "Prompt tokens of a request", buckets=_TOKENS
        )
        self.output_size: Histogram = of_model(
            Histogram, "moonpool_request_output_tokens", "Tokens generated for a request", buckets=_TOKENS
        )
        self.running: Gauge = of_model(
            Gauge, "moonpool_running_requests", "Sequences that have their first token"
        )
        self.waiting: Gauge = of_model(
            Gauge, "moonpool_waiting_requests", "Sequences that wait for their first token"
        )
        self.kv_usage: Gauge = of_model(
            Gauge,
            "moonpool_kv_pool_usage_ratio",
            "Blocks used by sequences, of all blocks of all nodes' pools",
        )
        self.prompt_tokens: Counter = of_model(
            Counter, "moonpool_prompt_tokens", "Prompt tokens of sequences that have their first token"
        )
        self.output_tokens: Counter = of_model(Counter, "moonpool_output_tokens", "Tokens generated")
        self.accepted_tokens: Counter = of_model(
            Counter,
            "moonpool_accepted_tokens",
            "Generated tokens accepted by speculation: they took no decode step of their own",
        )
        self.queried_tokens: Counter = of_model(
            Counter, "moonpool_prefix_queried_tokens", "Prompt tokens looked up in the KV cache"
        )
        self.hit_tokens: Counter = of_model(
            Counter, "moonpool_prefix_hit_tokens", "Prompt tokens found in the KV cache and not computed"
        )
        self.good: Counter = of_model(
            Counter,
            "moonpool_requests_within_slo",
            "Sequences that ended well and kept their SLOs: of the first token, and of the mean gap",
        )
        self._finished: Counter = family(
            Counter, "moonpool_requests", "Sequences by how they ended", ["model_name", "finish_reason"]
        )
        self.stage: Histogram = family(
            Histogram,
            "moonpool_api_stage_seconds",
            "Time that the API itself spends on a request: parse, tokenize, compile, detokenize, stream",
            ["stage"],
            buckets=_STAGES,
        )
        self.http: Counter = family(
            Counter,
            "moonpool_http_requests",
            "Answers by route and status",
            ["route", "method", "status"],
        )
        self._tenant_requests: Counter = family(
            Counter,
            "moonpool_tenant_requests",
            "Requests of a configured tenant by how they ended",
            ["tenant", "status"],
        )
        self._tenant_tokens: Counter = family(
            Counter,
            "moonpool_tenant_tokens",
            "Tokens of a configured tenant: prompt, of those cached, output",
            ["tenant", "kind"],
        )
        if beside is None:
            registry.register(_Exported(own))

    def snapshot(self) -> dict[str, Any]:
        """The metrics for the dashboard, by name without ``moonpool_``: a number; for histograms ``sum`` and
        ``buckets``, cumulative ``[le, count]`` pairs; for ``requests`` a number per finish reason.
        """
        found: dict[str, Any] = {}
        for metric in self._own.collect():
            name = metric.name.removeprefix("moonpool_")
            ours = [one for one in metric.samples if one.labels.get("model_name", self._model) == self._model]
            if metric.type == "histogram" and ours and "model_name" in ours[0].labels:
                pairs = [
                    [sample.labels["le"], sample.value] for sample in ours if sample.name.endswith("_bucket")
                ]
                total = next(sample.value for sample in ours if sample.name.endswith("_sum"))
                found[name] = {"buckets": pairs, "sum": total}
                continue
            samples = [sample for sample in ours if not sample.name.endswith("_created")]
            if name == "requests":
                found[name] = {sample.labels["finish_reason"]: sample.value for sample in samples}
            elif metric.type in ("counter", "gauge") and len(samples) == 1:
                found[name] = samples[0].value
        return found

    def of_tenant(self, tenant: str, status: str, tokens: Mapping[str, int]) -> None:
        """One HTTP request of a configured tenant ended; ``tokens`` by kind: prompt, cached, output."""
        tenant = self._tenants.of(tenant)
        self._tenant_requests.labels(tenant, status).inc()
        for kind, count in tokens.items():
            self._tenant_tokens.labels(tenant, kind).inc(count)

    def finished(self, reason: str) -> None:
        """One sequence ended: stop, length, cancelled, or the error's name."""
        self._finished.labels(self._model, reason).inc()

    def see_pool(self, counts: ClusterCounts) -> None:
        """Set the gauge of the model's own nodes; call before a scrape."""
        self.kv_usage.set(counts.num_used_blocks / counts.num_blocks if counts.num_blocks else 0.0)

    def see_cluster(self, counts: ClusterCounts) -> None:
        """Set the gauges of all nodes; call before a scrape."""
        core_metrics.cluster_nodes.clear()
        for labels, count in counts.nodes.items():
            core_metrics.cluster_nodes.labels(*labels).set(count)
        core_metrics.clock_skew_s.set(counts.clock_skew_s)
        for role in ROLES:
            core_metrics.missing_replicas.labels(role).set(counts.num_missing_replicas[role])


@dataclass(slots=True)
class SequenceClock:
    """Observes one sequence. ``arrived_s``: of its HTTP request. ``request_id``, and ``trace_id`` where
    its trace is exported: the exemplar of its latencies; timeline and trace say where the time went."""

    metrics: RequestMetrics
    arrived_s: float
    num_prompt_tokens: int
    request_id: str
    trace_id: str = ""
    slo: Slo | None = None  # that it must keep to count as good; None: as the others of ``metrics``
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0

    def begin(self) -> None:
        self.metrics.waiting.inc()

    def token(self, now_s: float, num_cached_tokens: int, *, accepted: bool = False) -> None:
        """A token arrived; ``num_cached_tokens``: of the prompt, with one of its tokens; ``accepted``: by
        speculation."""
        if self.num_tokens == 0:
            self.first_s = now_s
            metrics = self.metrics
            metrics.ttft.observe(now_s - self.arrived_s, self._exemplar())
            metrics.waiting.dec()
            metrics.running.inc()
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            metrics.queried_tokens.inc(self.num_prompt_tokens)
        else:
            self.metrics.gap.observe(now_s - self.last_s)
        # An increment takes as long as all else here: none of nothing.
        if num_cached_tokens:
            self.metrics.hit_tokens.inc(num_cached_tokens)
        self.metrics.output_tokens.inc()
        if accepted:
            self.metrics.accepted_tokens.inc()
        self.num_tokens += 1
        self.last_s = now_s

    def end(self, now_s: float, reason: str) -> None:
        """The sequence ended. Call exactly once after ``begin``."""
        metrics = self.metrics
        (metrics.running if self.num_tokens else metrics.waiting).dec()
        metrics.finished(reason)
        if not self.num_tokens:
            return
        metrics.e2e.observe(now_s - self.arrived_s, self._exemplar())
        metrics.prompt_size.observe(self.num_prompt_tokens)
        metrics.output_size.observe(self.num_tokens)
        tpot_s = 0.0
        if self.num_tokens > 1:
            tpot_s = (self.last_s - self.first_s) / (self.num_tokens - 1)
            metrics.tpot.observe(tpot_s, self._exemplar())
        slo = self.slo or metrics.slo
        kept = self.first_s - self.arrived_s <= slo.ttft_s and tpot_s <= slo.tbt_s
        if kept and reason in ("stop", "length", "tool_calls"):
            metrics.good.inc()

    def _exemplar(self) -> dict[str, str]:
        traced = {"trace_id": self.trace_id} if self.trace_id else {}
        most_chars = _MOST_EXEMPLAR_CHARS - len("request_id" + "".join((*traced, *traced.values())))
        return {"request_id": self.request_id[:most_chars], **traced}
