"""What the harness adds to rows: whether a figure beside ours is a limit, a peer or our own; and goals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moonpool.bench.harness.peers import ENVIRONMENTS
from moonpool.runtime.reports.conditions import BASELINE, LIMIT, PEER
from moonpool.runtime.reports.report import Row

# What the machine does without us: its memory, disk, wire or processor, or a structure without our work.
_LIMITS = (
    *(r"memcpy\b.*", r"raw (disk|sockets)\b.*", r"cudaMemcpy\b.*", r"limit of .*", r"floor"),
    *(r"large (copy|read|matmul|product)\b.*", r"plain dict", r"the transfer path itself"),
)
# Other systems: those with an environment of their own, those that are imported, and published figures.
_PEERS = (
    *(rf"{re.escape(name)}\b.*" for name in ENVIRONMENTS),
    *(r"transformers\b.*", r"vllm\b.*", r"vLLM alone", r"torch\b.*", r"SDPA\b.*", r"FlashInfer\b.*"),
    *(r"flashinfer\b.*", r"flex_attention\b.*", r"paper"),
)
_KINDS = ((LIMIT, re.compile("|".join(_LIMITS))), (PEER, re.compile("|".join(_PEERS))))


def kind_of(peer: str) -> str:
    """One of ``conditions.KINDS``. A name that is in neither list is our own work in another form."""
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(peer)), BASELINE)


def with_kinds(rows: Iterable[Row]) -> list[Row]:
    """The rows, each that has a peer with its kind."""
    return [
        row if row.peer is None or row.peer_kind else replace(row, peer_kind=kind_of(row.peer))
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the rows with a case, metric and peer that match these regular expressions.

    It is a bound on the ratio to the peer; on the value where the row has no ratio.
    """

    limit: str
    bound: float
    case: str
    metric: str
    peer: str = ""

    def fits(self, row: Row) -> bool:
        patterns = ((self.case, row.case), (self.metric, row.metric), (self.peer, row.peer or ""))
        return all(re.fullmatch(pattern, text) for pattern, text in patterns)


def least(bound: float, case: str, metric: str, peer: str = "") -> Goal:
    return Goal("at least", bound, case, metric, peer)


def most(bound: float, case: str, metric: str, peer: str = "") -> Goal:
    return Goal("at most", bound, case, metric, peer)


def with_goals(bench: str, rows: Iterable[Row]) -> list[Row]:
    """The rows, each with the first goal of the benchmark that fits it."""
    found = []
    for row in rows:
        goal = next((goal for goal in GOALS.get(bench, ()) if goal.fits(row)), None)
        if goal is not None and row.limit is None:
            row = replace(row, limit=goal.limit, limit_value=goal.bound)
        found.append(row)
    return found


_MACHINE = r"memcpy|raw sockets|cudaMemcpy"
_ANY = r".*"
_READ_WRITE = r"(read|write)"

GOALS: dict[str, tuple[Goal, ...]] = {
    "elastic": (least(25.0, r"planned .*", r"fewer node-hours at equal attainment", _ANY),),
    "store": (
        least(0.8, r"disk put, .*, [14]MiB, .*", "throughput", "raw disk"),
        least(0.85, r"disk get, .*, [14]MiB, .*", "throughput", "raw disk"),
        least(1.5, r"disk put, .*", "throughput", "lmcache"),
        most(0.3, "small/get/1MiB", "latency"),
        most(0.6, "small/put/1MiB", "latency"),
        least(0.9, r"host (put|get), 1MiB", "throughput", "memcpy"),
        least(0.6, r"host verified (put|get), 1MiB", "throughput", "memcpy"),
        most(20.0, r"host verified .*", "time a block beside memcpy"),
        least(0.85, r"remote/get/(64 × 1 MiB|\d × 64 MiB)", "bandwidth", "the transfer path itself"),
    ),
    "transfer": (
        # (case, bound without checksums, bound with).
        *(
            least(bound, f"{case}/checksum-{checksum}", "bandwidth", _MACHINE)
            for case, off, on in (
                (r"shm/64KiB/1024/read", 0.85, 0.55),
                (rf"(shm|tcp)/1MiB/64/{_READ_WRITE}", 0.95, 0.6),
                (r"shm/4MiB/64/read", 1.3, None),
                (r"shm/1MiB/64/read/x2", 1.5, None),
                (r"ucx(-tcp/1MiB/64|/64KiB/1024)/read", 0.7, 0.45),
                (r"ucx/1MiB/64/read", 0.85, 0.55),
            )
            for checksum, bound in (("off", off), ("on", on))
            if bound is not None
        ),
        least(1.8, rf"shm/1MiB/64/{_READ_WRITE}/checksum-off", "bandwidth", "nixl"),
        least(1.0, rf"shm/1MiB/64/{_READ_WRITE}/checksum-off", "bandwidth", "nixl no-thread"),
        least(2.0, rf"tcp/1MiB/64/{_READ_WRITE}/checksum-off", "bandwidth", "mooncake"),
        least(2.5, rf"tcp/1MiB/64/{_READ_WRITE}/checksum-off", "bandwidth", "nixl tcp"),
        least(300_000.0, r"(shm|ucx)/4KiB/4096/read/checksum-(on|off)", "spans"),
        most(25.0, r"shm/4KiB/1/write/checksum-off", "latency"),
        most(120.0, r".*/note/64B", "latency"),
        most(1.0, r".*/idle", "processor"),
        least(0.5, r"perimeter: tcp/.*", "bandwidth", "neither"),
        least(0.97, r"perimeter: shm/.*", "bandwidth", "neither"),
    ),
    "conductor": (
        least(2000.0, r".*, 1,024 nodes, 1,000,000 blocks, .*", "decisions"),
        most(1000.0, r".*, 1,024 nodes, 1,000,000 blocks, .*", "CPU of a decision, p99"),
        most(3.0, "growth", "cost at 4,096 nodes over 256"),
        most(5.0, r"HTTP, .*", "added latency"),
        most(0.3, r"two conductors, .*", "placement and booking"),
        least(50_000.0, r"SSE, \d+ streams of .*", "tokens"),
        least(0.8, "SSE, 2 workers beside 1", "tokens of each"),  # up to the cores, which a row names
        most(1.25, "SSE, 2 workers beside 1", "workers' CPU a token"),
        most(1.25, r"(decision|SSE): .*", r".* over .*"),
        most(1.05, r"memory after .*", "growth"),
        most(2.0, r"dashboard, .*", r"(a viewer|each of \d+ viewers)'s? share of a core"),
        most(50.0, r"dashboard, .*", "main thread a frame"),
    ),
    "migrate": (
        most(5.0, r"2,048 .*", "downtime p99 beyond 3 steps, client"),
        most(5.0, _ANY, r"downtime beyond a step, client: more than with .*"),
    ),
    "index": (
        least(5_000_000.0, _ANY, "publish"),
        most(40.0, _ANY, "Redis memory, logs( and stream)?"),
        most(3.0, r"10,000,000 blocks .*", "bootstrap of a mirror"),
        most(2.5, _ANY, "bootstrap of a mirror"),
        most(60.0, _ANY, "mirror memory"),
        least(500_000.0, _ANY, "lookups of 128 blocks", "plain dict"),
        least(250_000.0, _ANY, "lookups of 1024 blocks", "plain dict"),
        least(250_000.0, r".* on 1,024 nodes", "prefix maps of 128 blocks"),
        most(10.0, _ANY, "seen in a mirror, p99"),
    ),
    "engine": (
        most(1.3, r"llama-3-8b, .*, decode, batch 64, .*", "step", "floor"),
        most(1.5, r"llama-3-8b, .*, prompt of .*", "first token", "floor"),
        # At least .8 and .7 of what reading weights and KV takes; .9 of torch's best product.
        most(1.25, r"qwen3-[\d.]+b, bfloat16, decode, batch 1, .*", "step", "floor"),
        most(1.43, r"qwen3-[\d.]+b, bfloat16, decode, batch 8, .*", "step", "floor"),
        most(1.11, r"qwen3-[\d.]+b, bfloat16, prompt of .*", "first token", "floor"),
        least(1.6, r"qwen3-0.6b, .*, int8 weights, decode, batch 1, .*", "rate", "plain weights"),
        least(2.5, r"qwen3-0.6b, .*, int4 weights, decode, batch 1, .*", "rate", "plain weights"),
        most(1.01, r"shipped model, (int8 weights|(fp8_e4m3|int8) KV), .*", "perplexity", "plain weights"),
        most(1.05, r"shipped model, int4 weights, .*", "perplexity", "plain weights"),
        most(1.03, r"vocabulary of .*, decode, batch \d+", "step with masks", "without"),
        least(1.3, r"shipped model and draft, prose, .*", r"tokens a step, \d proposed"),
    ),
    "parallel": (
        # What a step may cost beside its tensors, and how much faster two stages must be than one.
        most(1.5, r"tp 2 × pp 1, decode, .*", "all beside tensors and exchanges"),
        least(1.5, r"tp 1 × pp 2, prompt of \d+", "speedup over one rank"),
        most(0.1, r"pp 2, [2-4] micro-batches, .*", "bubble"),
        least(1.7, r"pp 2, [2-4] micro-batches, .*", "decode throughput, a stage's", "one process, .*"),
        least(1.7, r"cp 2, prompt of \d+, by counted .*", "speedup over one rank"),
        least(3.0, r"cp 4, prompt of \d+, by counted .*", "speedup over one rank"),
        least(0.7, r".* → .*", r"blocks of \d+ tokens", "equal plans"),
    ),
    "serve": (
        most(10.0, r"1 concurrent, .*", "path's own cost a request"),
        most(1.0, r"1 concurrent, .*", "HTTP read to the prefill's first launch"),
        most(1.0, r"1 concurrent, one block .*", "hand-over"),
        most(1.5, r"new cluster, .*", "TTFT, first over tenth"),
        most(1.05, r"perimeter: .*", "path's own cost a request", "neither"),
        most(0.25, r"second turn, .*", "TTFT, second over first"),
        least(0.8, r"100 adapters of .*", "output throughput", "one merged model"),
        least(0.6, r"2,000 adapters of .*", "output throughput", "one merged model"),
        most(1.25, r"1 concurrent, .*", "TPOT", r"limit of \d+ cores .*"),
        most(1.11, r"prompt of .*", "TTFT", r"limit of \d+ cores .*"),
        least(1.5, r"(repetitive|code): 1 concurrent, .*", r".*, (ngram|suffix|draft)", "plain decoding"),
        least(0.97, r"(repetitive|code|prose): .*", r".*, (ngram|suffix|draft)", "plain decoding"),
        least(2.0, r"repetitive: .*", r"tokens a step, (ngram|suffix)"),
        least(1.3, r"prose: .*", "tokens a step, draft"),
    ),
    "vllm": (
        least(0.97, r".*, nothing hits, .*", "output throughput", "vLLM alone"),
        most(0.15, r"qwen3-0.6b, prefix .*", "TTFT, own host memory", _ANY),
        most(0.2, r"qwen3-0.6b, prefix .*", "TTFT, a peer engine", _ANY),
        most(0.3, r"qwen3-0.6b, prefix .*, after a restart", "TTFT, disk", _ANY),
    ),
    "kernels": (
        # A CPU's attention against a plain read, a GPU's against a large copy of the same device.
        least(0.6, r"decode (?!.* over ).*, batch 8, context 2048(, .*)?", "rate", "large read"),
        least(
            0.85,
            r"decode (?!.* over ).*, batch (32|64|128|256), context (4096|8192|32768|131072)(, .*)?",
            "rate",
            "large copy",
        ),
        least(0.7, r"decode (?!.* over ).*, batch 1, context 131072", "rate", "large copy"),
        least(0.75, r"decode .*bfloat16 over fp8.*", "rate", "pages as wide as q"),
        least(0.77, r"decode .*, 4 queries", "rate", "one query"),
        least(0.56, r"decode .*, 8 queries", "rate", "one query"),
        least(0.97, r"decode .*", "rate", "layer-major pool"),
        least(1.6, r"linear (1024x6144|3072x1024) bfloat16, weight int8, 1 rows", "rate", "bfloat16 weight"),
        least(2.5, r"linear (1024x6144|3072x1024) bfloat16, weight int4, 1 rows", "rate", "bfloat16 weight"),
        least(0.7, r"prefill \S+ heads of 128, .*, (8192|32768) new of \1", "rate", "SDPA cuDNN"),
        least(0.8, r"(write_kv|rotate_and_write) .*, bfloat16 to .*, 8192 tokens", "rate", "large copy"),
    ),
}
