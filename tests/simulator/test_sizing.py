"""Laws of ``moonpool plan`` for a workload: formulas, their check by simulation, refused options."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.report import validate
from moonpool.simulator.inputs.hardware import A800, H200, LLAMA3_8B, LLAMA3_70B, tensor_parallel
from moonpool.simulator.plan_command import plan
from moonpool.simulator.sizing.answer import Question, Sized, size
from moonpool.simulator.sizing.budget import budget, cost
from moonpool.simulator.sizing.check import check
from moonpool.simulator.sizing.delays import Delay, queue
from moonpool.simulator.sizing.search import Plan, evaluate, kinds, smallest_replicas, smallest_split
from moonpool.simulator.sizing.stages import Stage
from moonpool.simulator.sizing.traffic import Limits, Traffic

KINDS = kinds(H200, LLAMA3_8B, [1, 2])
CHAT = Traffic(100.0, 500, 200)
LIMITS = Limits(e2e_s=2.5)
traffics = st.builds(
    Traffic,
    rate=st.floats(1, 300),
    prompt_tokens=st.integers(50, 6000),
    output_tokens=st.integers(20, 400),
    hit=st.sampled_from([0.0, 0.5, 0.9]),
)


def quick_limits(traffic: Traffic) -> Limits:
    """Some four times what an idle node takes."""
    step_s = 4 * 7e-3
    return Limits(ttft_s=0.3 + traffic.prompt_tokens * 1e-4, tbt_s=step_s)


def sized(traffic: Traffic, limits: Limits) -> Sized:
    return Sized(traffic, smallest_split(KINDS, traffic, limits), smallest_replicas(KINDS, traffic, limits))


def gpus(found: Plan | None) -> float:
    return found.num_gpus if found is not None else math.inf


@given(traffics, st.floats(1.0, 3.0))
@settings(max_examples=40, deadline=None)
def test_more_load_never_needs_fewer_gpus(traffic: Traffic, more: float) -> None:
    limits = quick_limits(traffic)
    few, many = sized(traffic, limits), sized(traffic.times(more), limits)
    assert gpus(many.split) >= gpus(few.split)
    assert gpus(many.replicas) >= gpus(few.replicas)


@given(traffics, st.floats(0.5, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_stricter_limit_never_needs_fewer_gpus(traffic: Traffic, part: float) -> None:
    limits = quick_limits(traffic)
    strict = Limits(limits.ttft_s * part, limits.tbt_s * part)
    loose, tight = sized(traffic, limits), sized(traffic, strict)
    assert gpus(tight.split) >= gpus(loose.split)
    assert gpus(tight.replicas) >= gpus(loose.replicas)


@given(traffics)
@settings(max_examples=40, deadline=None)
def test_a_plan_keeps_its_limits_and_a_node_fewer_does_not(traffic: Traffic) -> None:
    limits = quick_limits(traffic)
    for found in sized(traffic, limits).plans:
        assert found.keeps(limits)
        last = found.decode or found.prefill
        if last.num_nodes > 1:
            fewer = replace(last, num_nodes=last.num_nodes - 1)
            stages = (found.prefill, fewer) if found.decode else (fewer, None)
            smaller = evaluate(*stages, traffic)
            assert smaller is None or not smaller.keeps(limits)


@given(traffics, st.floats(0.1, 10.0))
@settings(max_examples=40, deadline=None)
def test_costs_are_positive_and_add_up(traffic: Traffic, price: float) -> None:
    for found in sized(traffic, quick_limits(traffic)).plans:
        paid = cost(found, traffic, price)
        assert min(paid.prefill, paid.decode) > 0
        hour = 3600 * traffic.rate * (paid.prefill + paid.decode)
        assert hour == pytest.approx(found.num_gpus * price)
        assert paid.million_tokens * paid.tokens == pytest.approx(1e6 * paid.request)
        assert cost(found, traffic, 2 * price).request == pytest.approx(2 * paid.request)


def test_one_server_waits_as_the_textbook_has_it() -> None:
    wait = queue(1, 0.1, 5.0)
    assert wait is not None
    assert wait.mean_s == pytest.approx(0.5 * 0.1 / (2 * (1 - 0.5)))
    assert queue(1, 0.1, 10.0) is None
    # Erlang C of two servers at half their capacity is 1/3.
    wait = queue(2, 0.1, 10.0)
    assert wait is not None
    assert wait.mean_s == pytest.approx(1 / 3 * 0.1 / 2)


def test_delays_add_as_independent_ones() -> None:
    assert Delay(1.0, 3.0) + Delay(2.0, 4.0) == Delay(3.0, 5.0)


def test_budgets_are_the_textbook_products() -> None:
    found = sized(CHAT, LIMITS).split
    assert found is not None
    used = budget(found, CHAT, H200, LLAMA3_8B)
    linear = 100 * 500 * 2 * LLAMA3_8B.num_params
    assert linear < used.prefill_flops_per_s < 1.1 * linear
    assert used.moved_nbytes_per_s == pytest.approx(100 * 500 * LLAMA3_8B.kv_token_nbytes)
    # Little's law: as many sequences as arrive while one decodes.
    assert used.sequences == pytest.approx(100 * found.decodes.answer.mean_s, rel=0.05)
    assert 0 < used.kv_held < 1


def test_a_pipeline_holds_a_model_that_one_gpu_does_not() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        tensor_parallel(A800, LLAMA3_70B, 1)
    lane = tensor_parallel(A800, LLAMA3_70B, 1, 4)
    whole = tensor_parallel(A800, LLAMA3_70B, 4)
    assert 4 * lane.pool_tokens == pytest.approx(whole.pool_tokens, rel=1e-5)
    assert lane.profile.decode_base_s > whole.profile.decode_base_s


def test_nodes_with_a_pool_of_less_than_the_prompts_blocks_are_left_out() -> None:
    """The prompt has fewer tokens than the pools of two GPUs, and its blocks have more."""
    traffic = Traffic(1.0, 8500, 200)
    found = kinds(A800, LLAMA3_70B, [2, 8])
    assert any(8500 <= kind.lane.pool_tokens < traffic.in_blocks(8500) for kind in found)
    split = smallest_split(found, traffic, Limits(e2e_s=30.0))
    assert split is not None
    assert split.prefill.kind.lane.pool_tokens >= traffic.in_blocks(8500)


def test_users_ask_as_often_as_they_are_answered() -> None:
    found = size(Question(H200, LLAMA3_8B, [1, 2], CHAT, LIMITS, users=500, think_s=3.0))
    answer_s = found.plans[0].e2e.mean_s
    # Whole nodes: the last round's answers may be a little slower than those it was sized for.
    assert 0.999 * 500 <= found.traffic.rate * (3.0 + answer_s) <= 1.1 * 500


WORKLOADS = {
    "chat": (CHAT, LIMITS),
    "long prompts, half of them cached": (Traffic(15.0, 6000, 100, 0.5), Limits(e2e_s=3.0)),
    "long answers": (Traffic(20.0, 200, 600), Limits(ttft_s=0.5, tbt_s=0.02)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_formulas_are_near_the_simulation(name: str) -> None:
    """The most load by formula is within 20 % of the simulation's, the mean answer within 10 %."""
    traffic, limits = WORKLOADS[name]
    for found in sized(traffic, limits).plans:
        done = check(found, traffic, limits, 1, lambda line: None)
        assert 0.8 <= done.simulated_rate / done.part.traffic.rate <= 1.2
        assert done.simulated.e2e_mean_s == pytest.approx(done.part.plan.e2e.mean_s, rel=0.1)


@pytest.mark.slow
def test_a_light_load_is_simulated_as_the_formulas_say_and_alike_each_time() -> None:
    traffic, limits = Traffic(4.0, 500, 40), Limits(e2e_s=1.0)
    kind = KINDS[0]
    found = evaluate(Stage(kind, 1, 512), Stage(kind, 1, 512), traffic)
    assert found is not None
    once, again = (check(found, traffic, limits, 3, lambda line: None) for _ in range(2))
    assert once == again
    assert once.simulated.e2e_mean_s == pytest.approx(once.part.plan.e2e.mean_s, rel=0.1)


PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"
EXAMPLES = re.findall(r"^```text\n\$ moonpool plan (.*)\n((?:.*\n)*?)```", PAGE.read_text(), re.MULTILINE)
MAPS = [example for example in EXAMPLES if "--vary" in example[0]]


def prints(options: str, shown: str) -> bool:
    result = CliRunner().invoke(plan, shlex.split(options))
    return [line.rstrip() for line in result.output.splitlines()] == shown.splitlines()


@pytest.mark.parametrize(("options", "shown"), MAPS)
def test_the_maps_of_the_documentation_are_what_the_commands_print(options: str, shown: str) -> None:
    assert prints(options, shown)


@pytest.mark.slow
def test_the_simulated_example_of_the_documentation_is_what_the_command_prints() -> None:
    ((options, shown),) = [example for example in EXAMPLES if example not in MAPS]
    assert prints(options, shown)


SHORT = {"--rate": "20", "--prompt": "500", "--output": "40", "--e2e-p99": "1", "--parallel": "1,2"}


def run(options: dict[str, str | None]) -> Result:
    given = {"--gpu": "h200", "--model": "llama3-8b"} | options
    texts = [text for name, value in given.items() if value is not None for text in (name, value)]
    return CliRunner().invoke(plan, texts)


@pytest.mark.slow
def test_the_command_prints_both_answers_and_draws_one(tmp_path: Path) -> None:
    out, picture = tmp_path / "report.json", tmp_path / "plan.svg"
    options = SHORT | {"--price": "3", "--json": str(out), "--svg": str(picture)}
    result = run(options)
    assert result.exit_code == 0, result.output
    for word in (
        "by formula",
        "simulated",
        "cost of a million tokens",
        "load +20 %",
        "link / 2",
        "isaggregation",
    ):
        assert word in result.output
    validate(json.loads(out.read_text()))
    words = " ".join(ElementTree.parse(picture).getroot().itertext())
    assert "20 requests/s of 500 + 40 tokens" in words
    assert "GPUs" in words


def test_a_map_has_a_row_and_a_column_for_each_value() -> None:
    texts = ["--vary", "prompt=200,2000", "--vary", "link=1,50"]
    options = [text for item in SHORT.items() for text in item]
    result = CliRunner().invoke(plan, ["--gpu", "h200", "--model", "llama3-8b", *options, *texts])
    assert result.exit_code == 0, result.output
    *_, columns, first, second = result.output.splitlines()
    assert columns.split() == ["prompt", "link", "1", "link", "50"]
    assert (first.split()[0], second.split()[0]) == ("200", "2000")
    assert first.count("|") == second.count("|") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"--rate": None}, "one of --users, --rate and --trace"),
        ({"--users": "10"}, "--users and --rate"),
        ({"--trace": "file"}, "--rate and --trace"),
        ({"--prompt": None}, "--rate needs --prompt"),
        ({"--gpus": "8"}, "--gpus is for --trace"),
        ({"--think": "1"}, "--think is for --users"),
        ({"--e2e-p99": None}, "--e2e-p99, or --slo-ttft and --slo-tbt"),
        ({"--e2e-p99": "0.01"}, "--e2e-p99 0.01 is impossible"),
        ({"--e2e-p99": "-1"}, "--e2e-p99 must be above 0"),
        ({"--slo-ttft": "0.001"}, "--slo-ttft 0.001 is impossible"),
        ({"--slo-tbt": "0.001"}, "--slo-tbt 0.001 is impossible"),
        ({"--rate": "0"}, "--rate must be above 0"),
        ({"--hit": "1"}, "--hit must be from 0 to below 1"),
        ({"--link": "0"}, "--link must be above 0"),
        ({"--price": "-3"}, "--price must be above 0"),
        ({"--vary": "colour=1"}, "what can vary: rate"),
        ({"--model": "llama3-70b", "--gpu": "a800", "--parallel": "1"}, "give --parallel 2 or more"),
        ({"--rate": None, "--users": "10", "--vary": "rate=1,2"}, "contradicts --users"),
        ({"--rate": None, "--users": "10", "--think": "-1"}, "--think must be 0 s or more"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(options: dict[str, str | None], words: str) -> None:
    result = run(SHORT | options)
    assert isinstance(result.exception, ConfigError), result.output
    assert words in str(result.exception)
