"""What a sequence's own tokens say about those that follow: prompt lookup, without a model."""

from __future__ import annotations

from itertools import count, cycle, islice

from moonpool.engine.batching.sequence import Sequence

# Tokens that must be the same for what followed them to be proposed.
_MATCH_TOKENS = 3
# Most tokens of a match that are compared.
_LONGEST_MATCH = 64


class NgramProposer:
    """The tokens after the last place where the newest three tokens stand already.

    It is the prompt lookup of Saxena (2023), over prompt and output. A call takes constant time for each new
    token. One for each sequence; what it keeps can be made anew from the sequence's tokens.
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # position after the last of such tokens
        self._num_indexed = _MATCH_TOKENS  # tokens of the sequence before this position have been entered

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow the sequence's; it may have got more since."""
        position = self._look_up(sequence)
        return [] if position is None else _following(sequence, position, most)

    def _look_up(self, sequence: Sequence) -> int | None:
        """Return the position after the last earlier place of the newest tokens."""
        n, first = sequence.num_tokens, self._num_indexed - _MATCH_TOKENS
        if n <= _MATCH_TOKENS:
            return None
        recent = sequence.token_ids[first:].tolist()
        runs = zip(recent[:-_MATCH_TOKENS], recent[1:-2], recent[2:-1], strict=True)
        self._after.update(zip(runs, count(self._num_indexed)))
        self._num_indexed = n
        return self._after.get(tuple(recent[-_MATCH_TOKENS:]))


class SuffixProposer(NgramProposer):
    """As ``NgramProposer``, but no more tokens than the match is long: a long match goes on for longer."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        position = self._look_up(sequence)
        if position is None:
            return []
        tokens = sequence.token_ids
        length = min(position, _LONGEST_MATCH)
        same = tokens[position - length : position][::-1] == tokens[len(tokens) - length :][::-1]
        matched = length if same.all() else int(same.argmin())
        return _following(sequence, position, min(most, matched))


def _following(sequence: Sequence, position: int, num_tokens: int) -> list[int]:
    """Return the tokens from ``position`` on. Those up to the sequence's end are repeated where there are
    fewer: the newest tokens of a loop are found one turn before."""
    tokens: list[int] = sequence.token_ids[position : position + num_tokens].tolist()
    return list(islice(cycle(tokens), num_tokens))
