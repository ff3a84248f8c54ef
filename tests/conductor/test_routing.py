"""Which models a route chooses."""

from __future__ import annotations

from collections import Counter

from moonpool.conductor.api.models.classifier import Classifier
from moonpool.conductor.api.models.facts import Facts, facts_of
from moonpool.conductor.api.models.routing import choose
from moonpool.conductor.api.schemas import ChatBody, CompletionBody, parse
from moonpool.runtime.config.routes import SHIPPED, Route, read_route


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
    assert facts_of(parse(ChatBody, {"messages": messages}), "t") == Facts("t", 8, False, 0, "Hello", "Hello")
    messages += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Why?"}]
    later = facts_of(parse(ChatBody, {"messages": messages}), "t")
    assert (later.head, later.asked, later.turns) == ("Hello", "Why?", 2)
    several = parse(CompletionBody, {"prompt": [[1, 2], "four"], "priority": 3})
    assert (facts_of(several, "").num_chars, facts_of(several, "").priority) == (12, 3)
    assert facts_of(several, "").asked == "four"
    assert facts_of(parse(CompletionBody, {"prompt": [1, 2]}), "").asked == ""


def test_a_classifier_decides_by_its_threshold_after_the_rules() -> None:
    classifier = Classifier.load(SHIPPED)
    asked = Facts("", 20, False, 0, "", "What is the capital of Peru?")
    score = classifier.score(asked)
    for threshold, model in ((score + 1e-6, "small"), (score, "large")):
        given = {"models": ["small", "large"], "threshold": threshold}
        rules = [{"model": "tools", "tools": True}]
        route = read_route({"name": "auto", "rule": rules, "classifier": given, "weights": {"other": 1}})
        assert route.models == ("tools", "other", "small", "large")
        assert choose(route, asked, classifier) == (model,)
        assert choose(route, facts(tools=True), classifier) == ("tools",)
