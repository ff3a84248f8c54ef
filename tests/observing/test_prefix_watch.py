"""What is said of a request's prefix: each outcome by the one way there is to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.fleet.timing import ClockOffset
from moonpool.conductor.observing.prefix_outcomes import (
    _MAX_TENANTS,
    _REMEMBERED,
    MISSED,
    OUTCOMES,
    PrefixWatch,
)
from moonpool.conductor.observing.scheduling_metrics import prefix_outcomes
from moonpool.kvstore.blocks.keys import chain

SIZE = 4
BODY = list(range(100, 120))


class Asking:
    """A watch with a clock of its own, asked about prompts of made-up salts."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.watch = PrefixWatch(SIZE, lambda: self.now_s)

    def __call__(
        self,
        tokens: list[int],
        salt: bytes = b"a",
        *,
        tenant: str = "",
        held: int = 0,
        used: int = 0,
        elsewhere: int = 0,
    ) -> str:
        ids = np.array(tokens, np.int32)
        keys = chain(salt, ids, SIZE)
        found = self.watch.note(
            tenant,
            salt,
            ids,
            keys,
            held={"n": held},
            num_used_tokens=used,
            elsewhere=lambda after: elsewhere > after,
        )
        assert found.missed in ("", *MISSED)
        self.missed = found.missed
        return found.outcome


@pytest.fixture
def ask() -> Asking:
    return Asking()


def test_a_prompt_of_one_block_or_less_cannot_be_found(ask: Asking) -> None:
    assert [ask(BODY[:length]) for length in (1, 3, 4)] == ["short"] * 3
    assert ask(BODY[:5]) == "new"


def test_what_was_never_seen_is_new_and_then_a_hit_while_it_is_held(ask: Asking) -> None:
    assert ask(BODY) == "new"
    assert ask(BODY, held=4, used=16) == "hit"
    assert ask(BODY, held=4) == "unused"


def test_a_hit_says_why_it_reached_no_further(ask: Asking) -> None:
    def hit(tokens: list[int], held: int, used: int) -> str:
        assert ask(tokens, held=held, used=used * SIZE) == "hit"
        return ask.missed

    ask(BODY)
    assert hit(BODY, held=4, used=4) == "", "one token is always computed"
    assert hit(BODY, held=4, used=1) == "unused"
    assert hit(BODY, held=2, used=2) == "pending"
    ask.now_s = 6.0
    assert hit(BODY, held=2, used=2) == "dropped"
    assert hit([*BODY[:8], *range(12)], held=2, used=2) == "new", "other tokens after the second block"
    assert hit([*BODY, *range(50, 62)], held=2, used=2) == "dropped", "a longer prompt, too"
    assert hit([*BODY, *range(70, 82)], held=5, used=5) == "new", "the next turn of a conversation"
    assert ask.watch.to_dict()["missed"] == {"unused": 1, "pending": 1, "dropped": 2, "new": 2}


def test_what_is_missing_of_a_long_prompt_is_known_by_some_of_its_blocks(ask: Asking) -> None:
    long = list(range(SIZE * 1000))
    ask(long)
    ask.now_s = 6.0
    for tokens in (long, long + BODY, long[: SIZE * 700]):
        assert ask(tokens, held=600, used=600 * SIZE) == "hit"
        assert ask.missed == "dropped"
    assert len(ask.watch._marks) < 150


def test_the_rest_of_a_hit_may_be_of_another_salt_or_layout(ask: Asking) -> None:
    head, longer = BODY[:8], [*BODY, *range(50, 62)]

    def missed(tokens: list[int], salt: bytes, tenant: str = "", elsewhere: int = 0) -> str:
        assert ask(tokens, salt, tenant=tenant, held=2, used=8, elsewhere=elsewhere) == "hit"
        return ask.missed

    ask(BODY, b"a", tenant="acme")
    ask(head, b"b", tenant="acme")
    assert missed(BODY, b"b", "acme") == "salted"
    ask(head, b"c", tenant="other")
    assert missed(BODY, b"c", "other") == "new", "no tenant is told what another has sent"
    ask(head, b"d")
    assert missed(longer, b"d", elsewhere=8) == "new", "it has no more than was used"
    assert missed([*longer[:-1], 0], b"d", elsewhere=12) == "pending", "the head of it came just now"
    ask.now_s = 6.0
    ask(head, b"e")
    assert missed(longer, b"e", elsewhere=12) == "layout"
    assert ask.watch.to_dict()["missed"] == {"salted": 1, "new": 2, "pending": 1, "layout": 1}


def test_the_metric_has_hits_by_what_they_missed(ask: Asking) -> None:
    def count(outcome: str, missed: str = "") -> float:
        return float(prefix_outcomes.labels(outcome, missed)._value.get())

    before = [count("new"), count("hit"), count("hit", "pending")]
    ask(BODY)
    ask(BODY, held=4, used=16)
    ask(BODY, held=1, used=4)
    assert [count("new"), count("hit"), count("hit", "pending")] == [each + 1 for each in before]


def test_what_nobody_holds_is_pending_at_first_and_then_dropped(ask: Asking) -> None:
    ask(BODY)
    ask.now_s = 1.0
    assert ask(BODY) == "pending"
    ask.now_s = 6.0
    assert ask(BODY) == "dropped"


def test_the_same_tokens_of_another_salt_are_told_apart_from_new_ones(ask: Asking) -> None:
    assert [ask(BODY, salt) for salt in (b"a", b"b", b"c")] == ["new", "salted", "salted"]
    assert ask.watch.to_dict()["num_salts"] == 3
    assert ask.watch.to_dict()["num_salts_once"] == 3


def test_what_only_another_layout_has_is_told_apart_from_what_is_new_or_lost(ask: Asking) -> None:
    assert ask(BODY, elsewhere=4) == "layout"
    assert ask(BODY, b"b", elsewhere=4) == "layout"
    ask.now_s = 6.0
    assert ask(BODY, elsewhere=4) == "dropped"
    assert ask(BODY, held=4, used=16, elsewhere=4) == "hit"


def test_no_outcome_tells_a_tenant_what_another_has_sent(ask: Asking) -> None:
    ask(BODY, b"a", tenant="acme")
    guesses = [BODY, [1, *BODY[1:]], [1, 2, 3, 4, *BODY[4:]]]  # all of it, and what follows another head
    unseen = [[7 + token for token in guess] for guess in guesses]
    assert [ask(guess, b"b", tenant="other") for guess in guesses] == [
        ask(guess, b"c", tenant="third") for guess in unseen
    ]
    assert "salted" not in ask.watch.outcomes


def test_salts_that_asked_once_are_counted_as_they_are_forgotten_too(ask: Asking) -> None:
    for number in range(_REMEMBERED + 10):
        ask(BODY, number.to_bytes(4, "little"))
    for number in range(5):
        ask(BODY, (_REMEMBERED + number).to_bytes(4, "little"))
    told = ask.watch.to_dict()
    assert (told["num_salts"], told["num_salts_once"]) == (_REMEMBERED, _REMEMBERED - 5)


def test_a_changing_head_before_the_same_body_is_noticed(ask: Asking) -> None:
    assert [ask([head, *BODY[1:]]) for head in (1, 2, 3)] == ["new", "headed", "headed"]


def test_a_tenant_has_counts_of_its_own(ask: Asking) -> None:
    ids = np.array(BODY, np.int32)
    ask.watch.note("acme", b"r", ids, chain(b"r", ids, SIZE), held={}, num_used_tokens=0, reads_cache=False)
    assert ask.watch.to_dict()["tenants"] == {"acme": {"off": 1}}


def test_tenants_that_asked_last_have_counts(ask: Asking) -> None:
    for number in range(_MAX_TENANTS + 10):
        ask(BODY[:3], tenant=f"tenant-{number}")
        ask(BODY[:3], tenant="busy")
    told = ask.watch.to_dict()["tenants"]
    assert len(told) == _MAX_TENANTS
    assert told["busy"] == {"short": _MAX_TENANTS + 10}
    assert ask.watch.of_tenant("tenant-0") == {}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b"]), st.integers(0, 12)), max_size=40))
def test_every_request_has_one_outcome(requests: list[tuple[int, bytes, int]]) -> None:
    ask = Asking()
    for head, salt, length in requests:
        ask.now_s += 2.0
        assert ask([head, *BODY[:length]], salt) in OUTCOMES
    assert sum(ask.watch.outcomes.values()) == len(requests)


@given(st.floats(-100, 100), st.lists(st.floats(0, 1), min_size=16, max_size=40))
def test_a_clock_is_off_by_what_the_quickest_heartbeat_says(ahead_s: float, ways_s: list[float]) -> None:
    offset = ClockOffset()
    offset.observe(0.0, 5.0)  # of an older version, which does not say when
    assert offset.seconds is None
    for number, way_s in enumerate(ways_s):
        offset.observe(1000.0 + number + ahead_s, 1000.0 + number + way_s)
    assert offset.seconds == pytest.approx(ahead_s - min(ways_s[-16:]), abs=1e-6)
