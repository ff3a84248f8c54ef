"""The draft model, asked in every step: how often it is right on unseen prose, what it costs and gains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from moonpool.bench.engine.driver import session
from moonpool.bench.engine.perplexity import TEXT
from moonpool.bench.harness.turns import spread
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import Draft
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.speculation.draft_model import DraftModel
from moonpool.engine.speculation.speculator import Speculator
from moonpool.runtime.config.engine_options import SpeculativeOptions
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.reports.report import Row, versus

MOST_TOKENS = 4
_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 128
_BATCHES = (1, 8)


@dataclass(slots=True)
class Asked:
    """The begin of a step. asking_s: of its proposals, which follow."""

    at_s: float
    batch: int
    num_tokens: int  # of all sequences, before the step
    asking_s: float


@dataclass(slots=True)
class Always:
    """Asks a draft model for ``num_tokens`` of each sequence in each step, whatever that costs; 0: decodes
    plainly. It counts what is right, by position."""

    model: DraftModel
    num_tokens: int = 0
    asked: list[Asked] = field(default_factory=list)
    num_proposed: list[int] = field(default_factory=lambda: [0] * MOST_TOKENS)
    num_accepted: list[int] = field(default_factory=lambda: [0] * MOST_TOKENS)

    def may_draft(self, decodes: list[Sequence]) -> bool:
        return self.num_tokens > 0

    def proposing_s(self, decodes: list[Sequence]) -> float:
        return 0.0

    def propose(self, decodes: list[Sequence]) -> list[Draft]:
        began_s, k = time.perf_counter(), self.num_tokens
        found = self.model.propose([(sequence, k) for sequence in decodes]) if k else []
        asking_s = time.perf_counter() - began_s
        self.asked.append(Asked(began_s, len(decodes), sum(s.num_tokens for s in decodes), asking_s))
        return [Draft(s, s.num_tokens, ids) for s, ids in zip(decodes, found, strict=False) if ids]

    def stepped(self, decodes: list[Sequence], seconds: float) -> None:
        pass

    def verified(self, draft: Draft, num_accepted: int) -> None:
        for position in range(draft.num_tokens):
            # What follows a wrong token tells nothing.
            self.num_proposed[position] += position <= num_accepted
            self.num_accepted[position] += position < num_accepted


@dataclass(frozen=True, slots=True)
class Turn:
    """Medians over the steps of a whole batch. step_s: with its proposals. asking_s: of it, of the draft
    model. first_s: in which that computed the prompts."""

    tokens_a_step: float
    step_s: float
    asking_s: float
    first_s: float

    @classmethod
    def of(cls, asked: list[Asked], batch: int) -> Turn:
        whole = [each for each in asked if each.batch == batch]
        num_tokens = whole[-1].num_tokens - whole[0].num_tokens
        return cls(
            num_tokens / (len(whole) - 1) / batch,
            median(later.at_s - each.at_s for each, later in pairwise(whole)),
            median(each.asking_s for each in whole),
            asked[0].asking_s,
        )


async def rows(name: str, directory: Path, draft: Path, options: EngineOptions, rounds: int) -> list[Row]:
    """Of the model in ``directory`` with the draft model in ``draft``, on a CPU."""
    speculative = SpeculativeOptions(method="draft", num_tokens=MOST_TOKENS, draft_path=str(draft))
    options = replace(options, speculative=speculative)
    config = ModelConfig.from_checkpoint(directory)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT.read_text()).ids
    sampling, made = Sampling(ignore_eos=True, max_tokens=_OUTPUT_TOKENS), list[Row]()
    async with session(config, options, "cpu", "auto") as running:
        speculator = running.engine._scheduler.speculator
        assert isinstance(speculator, Speculator)
        assert speculator._model is not None
        always = running.engine._scheduler.speculator = Always(speculator._model)
        for batch in _BATCHES:
            found: dict[int, list[Turn]] = {k: [] for k in range(MOST_TOKENS + 1)}
            for number in range(-1, rounds):
                for always.num_tokens in found:
                    always.asked.clear()
                    await running.complete(parts(ids, batch, number), sampling)
                    if number >= 0:
                        found[always.num_tokens].append(Turn.of(always.asked, batch))
            case = f"{name}, prose, {_PROMPT_TOKENS} + {_OUTPUT_TOKENS} tokens, batch {batch}"
            made += turn_rows(case, found)
    for i, (accepted, proposed) in enumerate(zip(always.num_accepted, always.num_proposed, strict=True)):
        if proposed:
            metric = f"accepted at position {i + 1}, after right ones"
            made.append(Row(f"{name}, prose", metric, accepted / proposed, ""))
    return made


def turn_rows(case: str, found: dict[int, list[Turn]]) -> list[Row]:
    """``found``: turns by the number of proposed tokens, of the same rounds."""

    def middle(k: int, value: Callable[[Turn], float]) -> float:
        return median(map(value, found[k]))

    plain_s = middle(0, lambda turn: turn.step_s)
    made = [spread(case, "plain step", [turn.step_s for turn in found[0]], "ms", 1e3)]
    for k in list(found)[1:]:
        num_tokens, least = middle(k, lambda turn: turn.tokens_a_step), middle(k, lambda turn: turn.step_s)
        made.append(Row(case, f"tokens a step, {k} proposed", num_tokens, "tokens"))
        made.append(Row(case, f"tokens a step that pay for {k}", least / plain_s, "tokens"))
        parts_s = {
            "the draft model's part": middle(k, lambda turn: turn.asking_s),
            "the rest": middle(k, lambda turn: turn.step_s - turn.asking_s),
        }
        if k == 1:  # later it has these prompts in its cache
            parts_s["with the prompts"] = middle(k, lambda turn: turn.first_s)
        for what, part_s in parts_s.items():
            row = Row(case, f"{what}, {k} proposed", 1e3 * part_s, "ms")
            made.append(versus(row, "plain step", 1e3 * plain_s))
        rates = [turn.tokens_a_step / turn.step_s for turn in found[k]]
        row = versus(spread(case, f"rate, {k} proposed", rates, "tokens/s"), "plain", 1 / plain_s)
        ratios = [rate * plain.step_s for rate, plain in zip(rates, found[0], strict=True)]
        made.append(replace(row, ratio=median(ratios)))
    return made


def parts(ids: list[int], batch: int, number: int) -> list[list[int]]:
    """Return prompts from a text of these tokens, other ones in each round."""
    room = len(ids) - _PROMPT_TOKENS
    starts = [int(room * (i / batch + (number + 1) * 0.37)) % room for i in range(batch)]
    return [ids[start : start + _PROMPT_TOKENS] for start in starts]
