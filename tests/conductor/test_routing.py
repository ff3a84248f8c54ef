"""Which models a route chooses."""

from __future__ import annotations

from collections import Counter

from moonpool.conductor.api.models.routing import Facts, choose, facts_of
from moonpool.conductor.api.schemas import ChatBody, CompletionBody, parse
from moonpool.runtime.config.routes import Route, read_route


def facts(
    *, tenant: str = "", num_chars: int = 10, tools: bool = False, priority: int = 0, head: str = ""
) -> Facts:
    return Facts(tenant, num_chars, tools, priority, head)


def test_the_first_rule_that_fits_decides() -> None:
    rules = [
        {"model": "a", "tenant": "acme", "tools": True},
        {"model": "b", "min_chars": 100, "max_chars": 200},
        {"model": "c", "max_priority": -1},
    ]
    route = read_route({"name": "auto", "rule": rules, "model": "d"})
    assert choose(route, facts(tenant="acme", tools=True, num_chars=150)) == ("a",)
    assert choose(route, facts(tenant="acme", num_chars=150)) == ("b",)
    assert choose(route, facts(priority=-1)) == ("c",)
    assert choose(route, facts(num_chars=201)) == ("d",)


def test_a_cascade_gives_its_models_in_turn() -> None:
    cascade = {"models": ["small", "large"], "least_logprob": -1.5}
    assert choose(read_route({"name": "auto", "cascade": cascade}), facts()) == ("small", "large")


def test_weights_divide_conversations_and_keep_each_on_one_model() -> None:
    route = Route("r", weights=(("old", 9.0), ("new", 1.0), ("off", 0.0)))
    chosen = Counter(choose(route, facts(head=f"conversation {number}"))[0] for number in range(4000))
    assert set(chosen) == {"old", "new"}
    assert 0.07 < chosen["new"] / 4000 < 0.13
    assert len({choose(route, facts(head="one", num_chars=length)) for length in range(50)}) == 1


def test_facts_of_both_kinds_of_requests() -> None:
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hello"}]
    assert facts_of(parse(ChatBody, {"messages": messages}), "t") == Facts("t", 8, False, 0, "Hello")
    several = parse(CompletionBody, {"prompt": [[1, 2], "four"], "priority": 3})
    assert (facts_of(several, "").num_chars, facts_of(several, "").priority) == (12, 3)
