"""``--ablations``: the parts of the goodput policy, and the traces that it is for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from moonpool.bench.simulation.ablations import VARIANTS, ablations
from moonpool.bench.simulation.command import simulate
from moonpool.conductor.observing.slo import Slo
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest
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
    rows = ablations(ONE, prompts, lambda line: None)
    means = {row.case: row.value for row in rows if row.metric == "TTFT"}
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
    rows = ablations(replace(ONE, slo=Slo(1.1, 1.0)), prompts, lambda line: None)
    within = {row.case: row.value for row in rows if row.metric == "within the SLOs"}
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
