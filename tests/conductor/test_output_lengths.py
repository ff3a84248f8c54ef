"""How long an output will be, from those that ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.costs.output_lengths import OutputLengths


def test_before_anything_ended_a_guess_within_the_limit() -> None:
    lengths = OutputLengths()
    assert lengths.expected(100, 0, 1000) == 128
    assert lengths.expected(100, 0, 7) == 7
    assert lengths.expected(100, 300, 1000) == 300


def test_requests_are_judged_by_those_with_prompts_of_their_length() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.observe(10, 400)
        lengths.observe(10_000, 20)
    assert lengths.expected(12, 0, 1000) == 400
    assert lengths.expected(9_000, 0, 1000) == 20
    assert lengths.expected(300, 0, 1000) == 210, "a kind of which nothing is known: the mean of all"


def test_the_longer_it_runs_the_more_the_long_ones_count() -> None:
    lengths = OutputLengths()
    for _ in range(9):
        lengths.observe(10, 10)
    lengths.observe(10, 1010)
    assert lengths.expected(10, 0, 2000) == 110
    assert lengths.expected(10, 10, 2000) == 1000
    assert lengths.expected(10, 1010, 5000) == 1010, "longer than all that were seen: as long again"


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**5)), max_size=600),
    st.integers(1, 10**6),
    st.integers(0, 10**5),
    st.integers(1, 10**5),
)
def test_always_at_least_one_and_never_more_than_allowed(
    ended: list[tuple[int, int]], prompt: int, so_far: int, limit: int
) -> None:
    lengths = OutputLengths()
    for num_prompt_tokens, num_tokens in ended:
        lengths.observe(num_prompt_tokens, num_tokens)
    assert 1 <= lengths.expected(prompt, so_far, limit) <= limit
