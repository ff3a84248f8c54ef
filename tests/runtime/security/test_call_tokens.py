"""Tokens of calls: who may prove what, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.protos import conductor_pb2, fleet_pb2, node_pb2, store_pb2
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security.call_tokens import MAX_AGE_S, RoleKeys, TokenSigner, TokenVerifier
from moonpool.runtime.security.roles import PERMITTED, ROLES, Caller, NotPermitted, Unauthenticated
from moonpool.runtime.security.roles import check_permitted as check

KEY = "a key of a cluster, long enough"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pair(clock: Clock, key: str = KEY, role: str = "conductor") -> tuple[TokenSigner, TokenVerifier]:
    signer = TokenSigner(RoleKeys(key), Caller(role, "c 1"), clock=clock)
    return signer, TokenVerifier(RoleKeys(KEY), clock=clock)


def test_a_token_proves_role_and_name_once(clock: Clock) -> None:
    signer, verifier = pair(clock)
    token = signer.token("Node/Drain")
    assert verifier.verify("Node/Drain", token) == Caller("conductor", "c 1")
    with pytest.raises(Unauthenticated, match="used before"):
        verifier.verify("Node/Drain", token)


def test_a_token_of_another_key_or_method_or_role_is_refused(clock: Clock) -> None:
    signer, verifier = pair(clock)
    other, _ = pair(clock, key="another key of another cluster")
    with pytest.raises(Unauthenticated, match="another cluster key"):
        verifier.verify("Node/Drain", other.token("Node/Drain"))
    with pytest.raises(Unauthenticated, match="another method"):
        verifier.verify("Node/Drain", signer.token("Node/Status"))
    pretended = pair(clock, role="client")[0].token("Node/Drain").replace("client", "conductor", 1)
    with pytest.raises(Unauthenticated):
        verifier.verify("Node/Drain", pretended)


@pytest.mark.parametrize("late_s", [MAX_AGE_S + 1, -MAX_AGE_S - 1])
def test_an_old_token_and_one_of_the_future_are_refused(clock: Clock, late_s: float) -> None:
    signer, verifier = pair(clock)
    token = signer.token("Node/Drain")
    clock.now_s += late_s
    with pytest.raises(Unauthenticated, match="compare the clocks"):
        verifier.verify("Node/Drain", token)


@given(st.text(max_size=600))
@example("operator a b 1 " + "9" * 400 + " x")
def test_nothing_malformed_is_accepted(token: str) -> None:
    with pytest.raises(Unauthenticated):
        TokenVerifier(RoleKeys(KEY)).verify("Node/Drain", token)


@given(st.permutations(range(20)), st.data())
def test_calls_may_overtake_each_other_and_none_counts_twice(order: list[int], data: st.DataObject) -> None:
    signer, verifier = pair(Clock())
    tokens = [signer.token("Node/Status") for _ in order]
    for i in order:
        verifier.verify("Node/Status", tokens[i])
    again = data.draw(st.sampled_from(order))
    with pytest.raises(Unauthenticated, match="used before"):
        verifier.verify("Node/Status", tokens[again])


def test_a_number_far_behind_the_newest_is_refused(clock: Clock) -> None:
    signer, verifier = pair(clock)
    first, *_, last = [signer.token("Node/Status") for _ in range(5000)]
    verifier.verify("Node/Status", last)
    with pytest.raises(Unauthenticated, match="used before"):
        verifier.verify("Node/Status", first)


def test_the_key_of_a_role_signs_for_that_role_alone(clock: Clock) -> None:
    text = RoleKeys(KEY).text_of("client")
    signer = TokenSigner(RoleKeys(text), Caller("client", "reader"), clock=clock)
    _, verifier = pair(clock)
    assert verifier.verify("Store/Open", signer.token("Store/Open")).role == "client"
    with pytest.raises(ConfigError, match="cannot be used as operator"):
        TokenSigner(RoleKeys(text), Caller("operator", "reader"))


@pytest.mark.parametrize("key", ["short", "client:not hexadecimal"])
def test_a_key_that_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        RoleKeys(key)


def test_every_method_has_its_callers() -> None:
    methods = {
        f"{service.name}/{method.name}"
        for file in (one.DESCRIPTOR for one in (node_pb2, store_pb2, conductor_pb2, fleet_pb2))
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods == PERMITTED.keys()
    assert all(roles and roles <= set(ROLES) for roles in PERMITTED.values())


def test_a_client_drains_no_node_and_an_unknown_method_is_nobodys() -> None:
    check(Caller("conductor", ""), "Node/Drain")
    with pytest.raises(NotPermitted, match="not for the role client"):
        check(Caller("client", "reader"), "Node/Drain")
    with pytest.raises(NotPermitted):
        check(Caller("operator", ""), "Node/New")
