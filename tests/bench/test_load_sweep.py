"""``moonpool bench serve --load-sweep``: loads rise to the knee, which is found by its stated rule."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.serve import load_sweep, occupancy
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.cluster import MetricsPages
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Outcome, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.figures import Slo
from moonpool.bench.serve.load_sweep import Step, Turn, knee_of
from moonpool.bench.serve.occupancy import Occupancy
from moonpool.runtime.reports import report
from tests.bench.fake_server import FakeServer


def step_of(rate: float, ttft_s: float, *, served: float = 1.0) -> Step:
    """100 arrivals, evenly; answers 0.1 s after the first token, at ``served`` times the rate of arrivals."""
    answers = []
    for number in range(100):
        sent_s = number / rate
        done_s = max(sent_s, number / (served * rate)) + ttft_s + 0.1
        answers.append(Answer(sent_s, done_s, (done_s - 0.1, done_s), output_tokens=2))
    return Step(rate, [Turn(Outcome(answers, 1.0), Occupancy())])


def test_a_load_that_is_served_reaches_what_is_offered() -> None:
    (turn,) = step_of(10.0, 0.05).turns
    assert turn.offered == pytest.approx(10.0)
    assert turn.reached(Slo()) == pytest.approx(10.0, rel=0.02)
    assert turn.reached(Slo(ttft_s=0.04)) == 0.0
    (late,) = step_of(10.0, 0.05, served=0.5).turns
    assert late.offered == pytest.approx(10.0)
    assert late.reached(Slo()) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(
    ("ttfts", "served", "knee"),
    [
        ((0.1, 0.1, 0.2, 0.29, 0.31, 0.9), 1.0, 3),  # three times the first
        ((0.1, 0.4, 0.2, 0.5, 0.6), 1.0, 2),  # one alone may have met another process
        ((0.1, 0.1, 0.2), 1.0, None),  # it is beyond them
        ((0.1, 0.4, 0.5), 1.0, 0),
        ((0.1, 0.1, 0.1), 0.5, None),  # below the first
    ],
)
def test_the_knee_is_below_two_loads_in_a_row_that_break(
    ttfts: tuple[float, ...], served: float, knee: int | None
) -> None:
    steps = [step_of(10.0 * (at + 1), ttft_s, served=served) for at, ttft_s in enumerate(ttfts)]
    assert knee_of(steps, Slo()) == knee


def test_answers_that_are_missing_break_a_load() -> None:
    steps = [step_of(10, 0.1), step_of(20, 0.1), step_of(30, 0.1, served=0.8), step_of(40, 0.1, served=0.6)]
    assert knee_of(steps, Slo()) == 1
    # With an SLO, what is late is missing.
    assert knee_of([step_of(10, 0.1), step_of(20, 0.12), step_of(30, 0.12)], Slo(ttft_s=0.11)) == 0


async def test_an_open_loop_arrives_by_the_clock(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeps that are too long do not add up: these would make one second three. The clock is the test's."""
    work = Workload(requests=40, rate=40.0, prompt_tokens=2, output_tokens=1, seed=3)
    gaps, sleep, now_s = random.Random(work.seed), asyncio.sleep, 0.0
    due_s = sum(gaps.expovariate(work.rate) for _ in range(work.requests - 1))

    async def too_long(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds + 0.05 if seconds > 0 else 0.0
        await sleep(0)

    async with HttpClient(fake.url) as http:
        server = await Server.find("fake", http)
        monkeypatch.setattr(asyncio, "sleep", too_long)
        monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: now_s))
        outcome = await load.run(server, work)
    assert [one.error for one in outcome.answers] == [""] * work.requests
    assert due_s - 1e-9 < outcome.seconds < due_s + 0.05 + 1e-9


async def test_batches_and_queues_are_read_of_every_process(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occupancy, "_PERIOD_S", 0.01)
    work = Workload(requests=20, rate=40.0, prompt_tokens=2, output_tokens=1)
    async with HttpClient(fake.url) as http:
        server = await Server.find("fake", http)
        pages = await MetricsPages.of(server)
        # Two before the load, and two during it were taken up when the next is asked for.
        fake.scrapes_before = fake.num_scrapes + 5
        _, found = await occupancy.watched_load(server, pages, work)
    assert found is not None
    # The fake is the API and a node at the same time.
    assert (found.batch_size, found.queue_length, found.cpu_s) == (6.0, 4.0, 0.0)
    assert found.seconds > 0.02
    assert found.prompt_share == 0.75
    assert set(found.gpus) == {0.5}


async def test_a_reading_that_fails_meanwhile_does_not_fail_the_load(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node restarts."""
    monkeypatch.setattr(occupancy, "_PERIOD_S", 0.01)
    async with HttpClient(fake.url) as http:
        server = await Server.find("fake", http)
        pages = await MetricsPages.of(server)
        fake.lost_scrapes = {fake.num_scrapes + 3}  # of the first reading during the load
        fake.scrapes_before = fake.num_scrapes + 7  # the second one was taken up
        work = Workload(requests=20, rate=40.0, prompt_tokens=2, output_tokens=1)
        outcome, found = await occupancy.watched_load(server, pages, work)
    assert fake.num_scrapes > max(fake.lost_scrapes)
    assert [one.error for one in outcome.answers] == [""] * work.requests
    assert found is not None and set(found.running) == {6.0}


@pytest.mark.slow
async def test_the_command_draws_latency_against_load(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_sweep, "_QUICK_STEP_S", 0.3)
    monkeypatch.setattr(load_sweep, "_FIRST", 0.02)
    file, picture = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    arguments = ["serve", "--load-sweep", "--quick", "--url", fake.url, "--seed", "5", "--output-tokens", "4"]
    arguments += ["--slo-ttft", "5", "--json", str(file), "--plot", str(picture)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content, complete=True)
    by_case: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        by_case.setdefault(row["case"], {})[row["metric"]] = row["value"]
    first = next(iter(by_case.values()))
    assert {"offered", "reached", "goodput", "output throughput", "TTFT", "TPOT", "E2E", "failed"} <= set(
        first
    )
    assert {"utilisation of cores", "utilisation of cores, client"} <= set(first)
    assert {"mean batch size", "prompts' share of steps", "mean queue length"} <= set(first)
    assert first["utilisation of GPUs"] == 50
    rates = [float(case.split()[0]) for case in by_case if not case.startswith("knee")]
    assert len(rates) > 1
    assert rates == sorted(rates)
    panels = {curve["panel"] for curve in content["curves"]}
    assert {"TTFT against load", "E2E against load", "Throughput against load"} <= panels
    assert picture.read_text().count("<path") > 10
    conditions = content["environment"]["conditions"]
    assert conditions["seeds"] == {"prompts and arrivals": 5}
    assert (conditions["cache"]["state"], conditions["cache"]["tokens"]) == ("warm", 32)
    assert conditions["models"][0]["revision"] == "not said by the server"
