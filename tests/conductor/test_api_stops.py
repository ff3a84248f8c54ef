"""Stop strings: found wherever the tokens end, nothing shown past them, nothing held back for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.text.stop_strings import StopStrings

letters = st.text(alphabet="ab\n", min_size=1, max_size=4)


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Read character by character: the first stop that is complete ends it, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text(alphabet="ab\n", max_size=5), max_size=12), stops=st.lists(letters, max_size=3)
)
def test_the_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    stream, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += stream.push(piece)
        if stream.matched is not None:
            break
    else:
        shown += stream.flush()
    assert (shown, stream.matched) == expected("".join(pieces), stops)


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters, min_size=1, max_size=3))
def test_only_the_beginning_of_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stream, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        shown += stream.push(piece)
        if stream.matched is not None:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        # Nor is less held than could become a stop.
        assert not any(stop.startswith(seen[start:]) for stop in stops for start in range(len(shown))), (
            "text was shown that may be the beginning of a stop"
        )


def test_text_that_is_let_through_unread_does_not_stop() -> None:
    stream = StopStrings(["end"])
    assert stream.push("the e") == "the "
    assert stream.skip("nd of it, ") == "end of it, "
    assert stream.push("end") == ""
    assert stream.matched == "end"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # complete first
        (["c", "abc"], "xabcd", "x", "abc"),  # complete together: the longest
        (["你好"], "说你好", "说", "你好"),
        ([], "abc", "abc", None),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    for cut in range(len(text) + 1):
        stream = StopStrings(stops)
        parts = [stream.push(text[:cut])]
        if stream.matched is None:
            parts.append(stream.push(text[cut:]))
        assert ("".join(parts), stream.matched) == (shown, matched)
