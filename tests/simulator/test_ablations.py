"""``--ablations``: the parts of the goodput policy, and the traces that it is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.simulation.ablations import VARIANTS, ablations
from moonpool.bench.simulation.command import simulate
from moonpool.bench.simulation.rows import rows
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest, beside
from moonpool.simulator.simulation import Simulation
from tests.simulator.test_simulation import SMALL

ONE = Scenario(hardware=SMALL, num_prefill=1, num_decode=1, slo=Slo(30.0, 1.0))
SMALL_RUN = "--workload sessions=6,rate=4 --prefill 1 --decode 1 --ablations"


def test_only_variants_with_patience_let_a_short_prompt_overtake() -> None:
    # The first keeps the node busy while a long and a short one arrive.
    lengths = (4000, 4000, 100)
    prompts = [
        TraceRequest(1e-3 * i, tokens, 2, tuple(range(100 * i, 100 * i - (-tokens // 512))))
        for i, tokens in enumerate(lengths)
    ]
    found = ablations(ONE, prompts, lambda line: None)
    means = {row.case: row.value for row in found if row.metric == "TTFT"}
    assert list(means) == list(VARIANTS)
    in_turn = means["kv-aware"]
    assert means["goodput, first come, first served"] == pytest.approx(in_turn)
    assert means["goodput"] < in_turn
    assert means["kv-aware, with goodput's order"] == pytest.approx(means["goodput"])


def test_a_prompt_that_is_late_anyway_lets_those_pass_that_are_not() -> None:
    # The first takes 2.4 s. The second would begin then, too late; the third is in time only before it.
    lengths = {0.0: 20_000, 0.001: 5000, 2.0: 4000}
    prompts = [
        TraceRequest(at_s, tokens, 2, tuple(range(100 * i, 100 * i - (-tokens // 512))))
        for i, (at_s, tokens) in enumerate(lengths.items())
    ]
    found = ablations(replace(ONE, slo=Slo(1.1, 1.0)), prompts, lambda line: None)
    within = {row.case: row.value for row in found if row.metric == "within the SLOs"}
    assert within["goodput, late ones in turn"] == 0
    assert within["goodput"] == pytest.approx(100 / 3)


def test_an_azure_trace_gets_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    lines = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,2000,8" for i in range(120)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))
    command = ["--trace", str(path), "--block-tokens", "128", "--prefill", "1", "--decode", "1"]
    result = CliRunner().invoke(simulate, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "hit in pool" in result.output


def test_every_variant_is_compared_with_kv_aware() -> None:
    result = CliRunner().invoke(simulate, [*SMALL_RUN.split(), "--slo-ttft", "30"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.count("within the SLOs") == len(VARIANTS)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("", "slo-ttft"),
        ("--slo-ttft 30 --policy random", "--policy"),
        ("--slo-ttft 30 --plot x.svg", "--plot"),
    ],
)
def test_ablations_need_an_slo_and_choose_their_policies(options: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        CliRunner().invoke(simulate, [*SMALL_RUN.split(), *options.split()], catch_exceptions=False)


def test_two_classes_are_ordered_and_counted_by_their_own_slos() -> None:
    # The node is busy for 2.4 s; a batch prompt waits before a chat prompt comes, which only it can delay.
    chat, batch = Slo(2.0, 1.0), Slo(60.0, 1.0)
    prompts = [
        TraceRequest(at_s, tokens, 2, tuple(range(100 * i, 100 * i - (-tokens // 512))), slo=slo)
        for i, (at_s, tokens, slo) in enumerate(
            [(0.0, 20_000, batch), (0.5, 5000, batch), (1.5, 5000, chat), (1.6, 5000, None)]
        )
    ]
    scenario = replace(ONE, slo=Slo(30.0, 1.0))
    served = {each.arrival_s: each for each in Simulation(scenario, prompts).run().served}
    assert served[1.5].arrival_s + served[1.5].ttft_s < served[0.5].arrival_s + served[0.5].ttft_s
    outcome = Simulation(replace(scenario, policy="kv-aware"), prompts).run()
    assert [each.within(outcome.slo) for each in outcome.served] == [True, True, False, True]
    by_class = {row.metric: row.value for row in rows("x", outcome) if row.metric.startswith("within TTFT")}
    assert by_class == {
        "within TTFT 2 s, TBT 1 s": 0.0,
        "within TTFT 30 s, TBT 1 s": 100.0,
        "within TTFT 60 s, TBT 1 s": 100.0,
    }


def test_a_second_workload_runs_beside_the_first(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    batch = ["--beside", "sessions=4,rate=4,slo_ttft=60,slo_tbt=1", "--slo-ttft", "5", "--slo-tbt", "0.5"]
    command = [*SMALL_RUN.replace("--ablations", "").split(), *batch, "--json", str(path)]
    result = CliRunner().invoke(simulate, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics = [row["metric"] for row in json.loads(path.read_text())["rows"]]
    assert {"within TTFT 5 s, TBT 0.5 s", "within TTFT 60 s, TBT 1 s"} <= set(metrics)


def test_requests_beside_others_share_no_prefix_with_them() -> None:
    one, other = TraceRequest(0.0, 1024, 1, (0, 7)), TraceRequest(0.5, 512, 1, (0,))
    both = beside([one], [other, other])
    assert [request.block_ids for request in both] == [(0, 7), (8,), (8,)]
