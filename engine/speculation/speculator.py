"""Speculative decoding: which tokens to verify beside the next one, and what became of them.

A proposed token is computed in the same step as the token before it, and accepted if it is the token that is
sampled there. Sampling is a function of logits, seed and index (``execution.sampler``), so the tokens are
those of plain decoding, drawn ones too. A proposal is accepted with the probability that the model gives it,
as in rejection sampling (Leviathan et al., 2023), and needs no further random number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import Draft
from moonpool.engine.speculation.draft_model import DraftModel
from moonpool.engine.speculation.history import NgramProposer, SuffixProposer
from moonpool.runtime.config.engine_options import SpeculativeOptions

_log = logging.getLogger(__name__)

_TOKENS = Counter(
    "moonpool_speculated_tokens",
    "Tokens that were proposed and computed, by position in the proposal and by what became of them",
    ["method", "position", "outcome"],
)
_STEPS = Counter(
    "moonpool_speculated_steps", "Steps of one sequence in which proposed tokens were verified", ["method"]
)
_FAILURES = Counter(
    "moonpool_proposer_failures", "Sequences that decode plainly since their proposer raised", ["method"]
)

_PROPOSERS: dict[str, type[NgramProposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}

# An estimate that each verified token moves by a tenth reacts within a sentence. New sequences begin with the
# estimate over all of them, which moves by a hundredth: text without repetitions costs the first ones only.
_FIRST_ACCEPTANCE = 0.6
_GAIN, _GAIN_OF_ALL = 0.1, 0.01
# A sequence with bad proposals from its own tokens tries one again about every thirty tokens; new ones do in
# one of twenty steps.
_RECOVERY, _RECOVERY_OF_ALL = 0.001, 0.0001
# Of the time of decoding: what the draft model may cost beyond what it has saved.
_TRIALS = 0.01
# What it may cost at first, and the most that it keeps of what it has saved: in plain steps.
_SPARE_STEPS = 50.0
# It computes what it lacks of a sequence where that is estimated to save so many times as much.
_MARGIN = 2.0
# So many steps with its proposals are followed by a plain one: they are measured by it.
_BETWEEN_PLAIN = 32
# Of an estimate, at most: a step that took longer was disturbed.
_MOST_TIMES = 4.0


@dataclass(slots=True)
class _Drafting:
    """The proposals of one sequence. acceptance: estimated probability that a proposed token is accepted."""

    proposer: NgramProposer | None  # its own; None: the draft model
    plain: bool  # nothing is proposed
    acceptance: float


class Speculator:
    """Proposes tokens for the sequences of a step, as many as are worth their time."""

    def __init__(
        self,
        options: SpeculativeOptions,
        row_cost: Callable[[list[Sequence]], float] = lambda _: 0.0,
        step_s: Callable[[list[Sequence]], float] = lambda _: 0.0,
        model: DraftModel | None = None,
    ) -> None:
        """``row_cost(decodes)``: time that one proposed token adds to a step of these sequences, as a part of
        what the step takes for each of its tokens. ``step_s(decodes)``: what it takes without. ``model``: of
        the method draft."""
        self._options = options
        self._row_cost = row_cost
        self._step_s = step_s
        self._model = model
        self._usual = _FIRST_ACCEPTANCE
        # Of the draft model, in plain steps: what it may cost, and of that for a trial where it does not seem
        # to pay off.
        self._spare, self._trial = _SPARE_STEPS, 0.0
        self._asks, self._asked_s = False, 0.0  # in the present step; an estimate
        self._num_accepted = 0  # in the present step
        self._num_since_plain = 0
        self._whole = 1.0  # time from one plain step's end to the next one's, as a part of ``step_s``
        self._make = _PROPOSERS.get(options.method)
        assert (self._make is None) == (model is not None)

    def proposing_s(self, decodes: list[Sequence]) -> float:
        """Return the longest time that proposals for these sequences take, prompts apart; 0: next to none."""
        if self._model is None or not self._for_model(self._model, decodes)[0]:
            return 0.0
        return self._options.num_tokens * self._model.step_s(decodes)

    def propose(self, decodes: list[Sequence]) -> list[Draft]:
        """Propose tokens for a step of these sequences.

        The last token of a proposal is worth its time: the estimated probability that it is accepted is
        above its cost.
        """
        if self._model is None:
            wanted = self._for_histories(decodes)
            found = [tokens for each in wanted for tokens in self._ask([each])]
        else:
            wanted, self._asked_s, is_trial = self._for_model(self._model, decodes)
            self._asks, self._num_accepted = bool(wanted), 0
            if is_trial:
                self._trial = 0.0
            found = self._ask(wanted) if wanted else []
        drafts = zip(wanted, found, strict=True)
        return [Draft(sequence, sequence.num_tokens, tokens) for (sequence, _), tokens in drafts if tokens]

    def may_draft(self, decodes: list[Sequence]) -> bool:
        """Whether one of these sequences has a proposer."""
        return any(not self._of(sequence).plain for sequence in decodes)

    def verified(self, draft: Draft, num_accepted: int) -> None:
        """Learn that the first ``num_accepted`` tokens of a proposal were right, and no more."""
        method, drafting = self._options.method, self._of(draft.sequence)
        _STEPS.labels(method).inc()
        self._num_accepted += num_accepted
        for position in range(len(draft.proposed)):
            accepted = position < num_accepted
            _TOKENS.labels(method, str(position + 1), "accepted" if accepted else "rejected").inc()
            if position <= num_accepted:
                drafting.acceptance += _GAIN * (accepted - drafting.acceptance)
                self._usual += _GAIN_OF_ALL * (accepted - self._usual)

    def stepped(self, decodes: list[Sequence], seconds: float) -> None:
        """Learn what a step of these sequences without prompts took, from the end of the one before."""
        if self._model is None or not self.may_draft(decodes):
            return
        step_s = max(self._step_s(decodes), 1e-9)
        if self._asks:
            self._num_since_plain += 1
            plain_s = self._whole * step_s
            cost_s = min(seconds, _MOST_TIMES * (plain_s + self._asked_s)) - plain_s
            self._spare += self._num_accepted / len(decodes) - cost_s / plain_s
        else:
            self._num_since_plain = 0
            self._whole += _GAIN * (min(seconds / step_s, _MOST_TIMES) - self._whole)
        self._trial += _TRIALS
        self._spare = min(self._spare + _TRIALS, _SPARE_STEPS)

    def _length(self, acceptance: float, least: float) -> int:
        length, probability = 0, acceptance
        while length < self._options.num_tokens and probability > least:
            length, probability = length + 1, probability * acceptance
        return length

    def _for_histories(self, decodes: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Return which sequences look into their own tokens, for how many."""
        least, wanted = self._row_cost(decodes), []
        for sequence in decodes:
            drafting = self._of(sequence)
            if drafting.plain:
                continue
            if most := self._length(drafting.acceptance, least):
                wanted.append((sequence, most))
            else:
                drafting.acceptance += _RECOVERY
                self._usual += _RECOVERY_OF_ALL * (1 - self._usual)
        return wanted

    def _for_model(
        self, model: DraftModel, decodes: list[Sequence]
    ) -> tuple[list[tuple[Sequence, int]], float, bool]:
        """Return for which sequences the draft model is asked, for how many tokens, how long that takes, and
        whether one of them is a trial.

        It computes what it lacks of a sequence if the tokens that are left save much more time than that
        takes, and else as a trial. What it costs must have been saved by it before, but for a small part.
        """
        step_s = self._step_s(decodes)
        least, share_s = self._row_cost(decodes), step_s / len(decodes)
        row_s, trial_s = least * share_s, self._trial * step_s
        wanted, asked_s, is_trial = list[tuple[Sequence, int]](), 0.0, False
        if self._num_since_plain >= _BETWEEN_PLAIN:
            return wanted, asked_s, is_trial
        for sequence in decodes:
            drafting = self._of(sequence)
            if drafting.plain:
                continue
            most = self._length(drafting.acceptance, least)
            if not most and (is_trial or trial_s <= row_s):
                continue
            missing_s = model.missing_s(sequence)
            saved_s = _saved(sequence, drafting.acceptance, most, least) * share_s if most else 0.0
            pays = most > 0 and saved_s >= _MARGIN * missing_s
            if not pays and (is_trial or trial_s <= missing_s + row_s):
                continue
            cost_s = missing_s + max(most, 1) * row_s
            if asked_s + cost_s <= self._spare * step_s:
                asked_s += cost_s
                is_trial |= not pays
                wanted.append((sequence, max(most, 1)))
        return wanted, asked_s, is_trial

    def _ask(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return what is proposed. After an error these sequences decode plainly."""
        try:
            if self._model is not None:
                return self._model.propose(wanted)
            return [self._own(sequence).propose(sequence, most) for sequence, most in wanted]
        except Exception:
            # What is proposed is a guess: without one a sequence decodes plainly.
            _log.exception("no more proposals for %s", ", ".join(s.request_id for s, _ in wanted))
            for sequence, _ in wanted:
                _FAILURES.labels(self._options.method).inc()
                self._of(sequence).plain = True
            return [[] for _ in wanted]

    def _own(self, sequence: Sequence) -> NgramProposer:
        proposer = self._of(sequence).proposer
        assert proposer is not None
        return proposer

    def _of(self, sequence: Sequence) -> _Drafting:
        if not isinstance(sequence.drafting, _Drafting):
            plain = not _may_speculate(sequence)
            proposer = None if plain or self._make is None else self._make()
            sequence.drafting = _Drafting(proposer, plain, self._usual)
        return sequence.drafting


def _saved(sequence: Sequence, acceptance: float, most: int, least: float) -> float:
    """Return how many steps a sequence saves until its end at most, with ``most`` proposed tokens each time.

    A step takes 1 + most * least times as long, for 1 + p + ... + p ** most tokens: p is the probability
    that one is accepted (Leviathan et al., 2023, theorem 3.8).
    """
    num_left = sequence.sampling.max_tokens - (sequence.num_tokens - sequence.num_prompt_tokens)
    tokens_a_step = sum(acceptance**i for i in range(most + 1))
    return num_left * (1 - (1 + most * least) / tokens_a_step)


def _may_speculate(sequence: Sequence) -> bool:
    """Penalties and structures depend on the tokens before, which a step of several tokens does not know."""
    sampling = sequence.sampling
    return sampling.speculates and not sampling.penalized and sequence.automaton is None
