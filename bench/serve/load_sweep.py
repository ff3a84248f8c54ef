"""Latency against load: an open loop that is raised step by step until the knee."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median

from rich.console import Console
from rich.table import Table

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import percentiles, quantile
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.cluster import MetricsPages
from moonpool.bench.serve.client.server import Outcome, RequestFailed, Server
from moonpool.bench.serve.client.workload import Prompts, Workload
from moonpool.bench.serve.figures import Slo, output_rate
from moonpool.bench.serve.occupancy import FIGURES, Occupancy, figures_of, watched_load
from moonpool.bench.serve.settings import Settings
from moonpool.runtime.reports.report import Curve, Row, number

# The first load, of what one request at a time would be; each further one is higher by this factor.
_FIRST, _FACTOR = 0.5, 1.5
_MAX_STEPS = 16
# A step arrives in so many seconds, and has at least so many requests.
_STEP_S, _STEP_REQUESTS = 10.0, 48
_QUICK_STEP_S, _QUICK_REQUESTS, _QUICK_STEPS = 1.0, 8, 4
_TABLE_WIDTH = 240
# What breaks a load: see ``broken``.
TTFT_TIMES, REACHED = 3.0, 0.9
# So many loads in a row must break: one may have met another process of the machine.
_CONFIRM = 2
RULE = (
    f"knee: the highest load below {_CONFIRM} in a row with a p95 TTFT over {TTFT_TIMES:g} times that of the "
    f"lowest load, or with good answers a second under {100 * REACHED:.0f} % of the arrivals"
)
_Figure = Callable[[Answer], float]
_LATENCIES: dict[str, _Figure] = {
    "TTFT": lambda answer: answer.ttft_s,
    "TPOT": lambda answer: answer.tpot_s,
    "E2E": lambda answer: answer.e2e_s,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of a load, of which at least one request was answered."""

    outcome: Outcome
    occupancy: Occupancy | None

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.outcome.answers if not answer.error]

    @property
    def offered(self) -> float:
        """Arrivals a second. An open loop sends them, whatever is answered."""
        sent = sorted(answer.sent_s for answer in self.outcome.answers)
        return (len(sent) - 1) / (sent[-1] - sent[0])

    def reached(self, slo: Slo) -> float:
        """Answers within the SLOs a second, from the first answer to the last arrival. Without SLOs every
        answer counts."""
        last_s = max(answer.sent_s for answer in self.outcome.answers)
        done = sorted(answer.done_s for answer in self.good)
        begin_s = done[0] if done else last_s
        within = [answer for answer in self.good if begin_s < answer.done_s <= last_s and slo.met(answer)]
        return len(within) / (last_s - begin_s) if last_s > begin_s else 0.0


@dataclass
class Step:
    """A load of ``rate`` requests a second."""

    rate: float
    turns: list[Turn] = field(default_factory=list)

    def values(self, figure: _Figure) -> list[float]:
        return [figure(answer) for turn in self.turns for answer in turn.good]

    def mean(self, figure: Callable[[Turn], float]) -> float:
        return median(map(figure, self.turns))

    def ttft_p95_s(self) -> float:
        return quantile(self.values(_LATENCIES["TTFT"]), 0.95)


def broken(step: Step, lightest: Step, slo: Slo) -> bool:
    """The rule of the knee, for one load."""
    late = step.ttft_p95_s() > TTFT_TIMES * lightest.ttft_p95_s()
    return late or step.mean(lambda turn: turn.reached(slo)) < REACHED * step.mean(lambda turn: turn.offered)


def knee_of(steps: Sequence[Step], slo: Slo) -> int | None:
    """The index of the knee in ``steps``, lowest load first; None: it is beyond them, or below the first."""
    bad = [broken(step, steps[0], slo) for step in steps]
    for at in range(len(steps) - _CONFIRM + 1):
        if all(bad[at : at + _CONFIRM]):
            return at - 1 if at else None
    return None


async def sweep_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Every figure of every load, and the knee. The loads that the first round found are repeated in turn.

    Raises:
        RequestFailed: every request of a load failed.
    """
    server, work, slo = await settings.server(run), settings.workload, settings.slo
    pages = await MetricsPages.of(server)
    if pages is None:
        run.say("the server does not publish its cores, batches and queues: they are left out")
    alone_s = await _alone_s(server, work)
    steps: list[Step] = []

    async def turn(rate: float, round_number: int, at: int) -> Turn:
        step_s, fewest = (_QUICK_STEP_S, _QUICK_REQUESTS) if run.quick else (_STEP_S, _STEP_REQUESTS)
        seed = work.seed + 1000 * (round_number + 1) + at
        return await _turn(
            server, pages, replace(work, rate=rate, requests=max(fewest, round(rate * step_s)), seed=seed)
        )

    await turn(_FIRST / alone_s, -1, 0)
    for at in range(_QUICK_STEPS if run.quick else _MAX_STEPS):
        step = Step(_FIRST * _FACTOR**at / alone_s)
        run.say(f"{step.rate:.3g} requests/s")
        step.turns.append(await turn(step.rate, 0, at))
        steps.append(step)
        if len(steps) > _CONFIRM and all(broken(one, steps[0], slo) for one in steps[-_CONFIRM:]):
            break
    for round_number in range(1, run.rounds):
        run.say(f"round {round_number + 1} of {run.rounds}")
        for at, step in enumerate(steps):
            step.turns.append(await turn(step.rate, round_number, at))
    knee = knee_of(steps, slo)
    _show(steps, knee, slo)
    run.curves += _curves(steps, knee, slo)
    tokens = f"{work.prompt_tokens} + {work.output_tokens} tokens"
    for row in chain(*(_rows(f"{step.rate:.3g} requests/s, {tokens}", step, slo) for step in steps)):
        yield row
    if knee is not None:
        best = steps[knee]
        yield Row(f"knee, {tokens}", "offered", best.mean(lambda turn: turn.offered), "requests/s")
        yield Row(f"knee, {tokens}", "output throughput", best.mean(_throughput), "tokens/s")
        yield Row(f"knee, {tokens}", "TTFT p95", 1e3 * best.ttft_p95_s(), "ms")
    run.say(RULE if knee is not None else f"no knee among these loads; {RULE}")


async def _alone_s(server: Server, work: Workload) -> float:
    """Seconds of one request on an idle server: the second of two."""
    prompts = Prompts(work.seed, "load sweep, alone")
    for _ in range(2):
        answer = await server.ask(prompts.draw(work.prompt_tokens), work.output_tokens)
    return answer.e2e_s


async def _turn(server: Server, pages: MetricsPages | None, work: Workload) -> Turn:
    outcome, occupancy = await watched_load(server, pages, work)
    if all(answer.error for answer in outcome.answers):
        errors = ", ".join(load.failures(outcome.answers))
        raise RequestFailed(f"every request of a load of {work.rate:g} requests/s failed: {errors}")
    return Turn(outcome, occupancy)


def _throughput(turn: Turn) -> float:
    return output_rate(turn.outcome)


def _of_occupancy(figure: Callable[[Occupancy], float]) -> Callable[[Turn], float]:
    return lambda turn: 0.0 if turn.occupancy is None else figure(turn.occupancy)


def _figures(step: Step, slo: Slo) -> dict[str, tuple[str, Callable[[Turn], float]]]:
    found: dict[str, tuple[str, Callable[[Turn], float]]] = {
        "offered": ("requests/s", lambda turn: turn.offered),
        "reached": ("requests/s", lambda turn: turn.reached(Slo())),
        "output throughput": ("tokens/s", _throughput),
        "failed": ("requests", lambda turn: float(len(turn.outcome.answers) - len(turn.good))),
    }
    if slo.ttft_s or slo.tpot_s:
        found["goodput"] = ("requests/s", lambda turn: turn.reached(slo))
    busy = [turn.occupancy for turn in step.turns if turn.occupancy is not None]
    if len(busy) == len(step.turns):
        found |= {metric: (unit, _of_occupancy(figure)) for metric, unit, figure in figures_of(busy[0])}
    return found


def _rows(case: str, step: Step, slo: Slo) -> Iterator[Row]:
    for metric, (unit, figure) in _figures(step, slo).items():
        values = [figure(turn) for turn in step.turns]
        yield Row(case, metric, median(values), unit, samples=values)
    for metric, latency in _LATENCIES.items():
        # Percentiles are of all requests; samples, and their noise, are medians of rounds.
        of_rounds = [1e3 * median(map(latency, turn.good)) for turn in step.turns]
        found = percentiles(step.values(latency), 1e3)
        yield Row(case, metric, found["p50"], "ms", samples=of_rounds, **found)


def _show(steps: Sequence[Step], knee: int | None, slo: Slo) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim", title=RULE, title_justify="left")
    figures = (f"{name},\n{unit}" for name, (unit, _) in _figures(steps[0], slo).items())
    for heading in ("", *figures, *(f"{name} p50/p90/\np95/p99, ms" for name in _LATENCIES)):
        table.add_column(heading, justify="right")
    for at, step in enumerate(steps):
        cells = [number(step.mean(figure)) for _, figure in _figures(step, slo).values()]
        for latency in _LATENCIES.values():
            found = percentiles(step.values(latency), 1e3)
            cells.append("/".join(map(number, (found["p50"], found["p90"], found["p95"], found["p99"]))))
        table.add_row("knee →" if at == knee else "", *cells)
    Console(highlight=False, width=_TABLE_WIDTH).print(table)


def _curves(steps: Sequence[Step], knee: int | None, slo: Slo) -> Iterator[Curve]:
    """A panel for each latency and for throughput; the knee is a vertical line."""
    offered = [step.mean(lambda turn: turn.offered) for step in steps]
    axis = "offered, requests/s"

    def lines(panel: str, y: str, named: dict[str, list[float]]) -> Iterator[Curve]:
        for name, values in named.items():
            yield Curve(panel, name, axis, y, list(zip(offered, values, strict=True)))
        if knee is not None:
            top = max(max(values) for values in named.values())
            yield Curve(panel, "knee", axis, y, [(offered[knee], 0.0), (offered[knee], top)])

    for metric, latency in _LATENCIES.items():
        found = [percentiles(step.values(latency), 1e3) for step in steps]
        yield from lines(
            f"{metric} against load",
            "ms",
            {
                "p50": [each["p50"] for each in found],
                "p90": [each["p90"] for each in found],
                "p95": [each["p95"] for each in found],
                "p99": [each["p99"] for each in found],
            },
        )
    reached = {"reached": [step.mean(lambda turn: turn.reached(Slo())) for step in steps], "offered": offered}
    if slo.ttft_s or slo.tpot_s:
        reached["within the SLOs"] = [step.mean(lambda turn: turn.reached(slo)) for step in steps]
    yield from lines("Throughput against load", "requests/s", reached)
    if all(turn.occupancy is not None for step in steps for turn in step.turns):
        counts = {
            name: [step.mean(_of_occupancy(figure)) for step in steps]
            for name, unit, figure in FIGURES
            if unit == "sequences"
        }
        yield from lines("Batch and queue against load", "sequences", counts)
