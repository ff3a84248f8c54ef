"""From logits to tokens. Stateless: the same lineage and seed yield the same token on any node."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.batching.sequence import Sequence, TokenLogprobs
from moonpool.engine.device.device import Device
from moonpool.kernels.dispatch import argmax_rows, forbid_tokens

_NO_LOGPROBS: list[TokenLogprobs | None] = []
_GROUP_ELEMENTS = 1 << 18  # logits sampled at once on a CPU: a megabyte


class SamplingBatch:
    """The sampling parameters of a list of sequences as tensors, built once per list."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: Device) -> None:
        self.plain = all(sequence.sampling.plain_greedy for sequence in sequences)
        self.groups: list[tuple[int, int, _Group]] = []  # (first row, end row, parameters)
        if self.plain:
            return
        # Small groups: the system would map, zero and unmap temporaries of many megabytes at every step.
        size = max(1, _GROUP_ELEMENTS // vocab_size) if not device.runs_ahead else len(sequences)
        for first in range(0, len(sequences), size):
            some = sequences[first : first + size]
            self.groups.append((first, first + len(some), _Group(some, vocab_size, device)))

    def expect(self, num_unknown: list[int]) -> None:
        """Sample for sequences with so many more output tokens, by row, than they have now; empty: none."""
        for first, end, group in self.groups:
            group.num_unknown = num_unknown[first:end] or [0] * (end - first)


class _Group:
    """Rows of a batch that are sampled together. "Drawn" rows are the non-greedy ones."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: Device) -> None:
        self.plain = all(sequence.sampling.plain_greedy for sequence in sequences)
        if self.plain:
            return
        self._sequences = sequences
        self._device = device
        self.num_unknown = [0] * len(sequences)
        params = [sequence.sampling for sequence in sequences]
        drawn = [i for i, p in enumerate(params) if not p.greedy]
        self.all_drawn = len(drawn) == len(params)
        self.drawn_rows = self._rows(drawn)
        self.temperature = self._column([params[i].temperature for i in drawn])
        self.has_min_p = any(params[i].min_p > 0 for i in drawn)
        self.min_p = self._column([params[i].min_p for i in drawn])
        # Only rows that cut the tail of the distribution need it sorted.
        cut = [k for k, i in enumerate(drawn) if 0 < params[i].top_k < vocab_size or params[i].top_p < 1]
        self.cut_rows = self._rows(cut)
        cutting = [params[drawn[k]] for k in cut]
        self.top_k = self._column([p.top_k or vocab_size for p in cutting]).long().clamp_(max=vocab_size)
        self.top_p = self._column([p.top_p for p in cutting]).double()
        self._drawn = drawn
        self._seeds = np.array([params[i].seed for i in drawn], np.uint64)
        self.logprob_rows = [i for i, p in enumerate(params) if p.num_logprobs >= 0]
        self.num_logprobs = [params[i].num_logprobs for i in self.logprob_rows]
        self._biased = [i for i, p in enumerate(params) if p.logit_bias]
        self._min_tokens = [i for i, p in enumerate(params) if p.min_tokens > 0]
        self._automata = [(i, s.automaton) for i, s in enumerate(sequences) if s.automaton is not None]
        self._penalized = [i for i, p in enumerate(params) if p.penalized]
        if self._penalized:
            self._count_tokens(vocab_size)

    def waits(self, vocab_size: int) -> Tensor:
        """Return random numbers of an exponential distribution, one for each drawn row and token: float32
        [num_drawn, vocab], a hash of (seed, output index, token)."""
        index = np.array([self._index(i) for i in self._drawn], np.uint64)
        keys = torch.from_numpy(stream_keys(self._seeds, index)[:, None])
        return exponential(self._device.upload(keys), vocab_size)

    def _index(self, row: int) -> int:
        """Return the index of the output token that is sampled next."""
        return self._sequences[row].num_output_tokens + self.num_unknown[row]

    def adjust(self, logits: Tensor, *, in_place: bool = False) -> Tensor:
        """Return logits (float32 [n, vocab]) with min_tokens, bias, penalties and token masks applied: in
        new memory, or ``in_place``."""
        if not (self._biased or self._min_tokens or self._penalized or self._automata):
            return logits
        scores = logits if in_place else logits.clone()
        for i in self._min_tokens:
            sequence = self._sequences[i]
            if self._index(i) < sequence.sampling.min_tokens and sequence.stop_ids:
                scores[i, list(sequence.stop_ids)] = float("-inf")
        for i in self._biased:
            bias = self._sequences[i].sampling.logit_bias
            scores[i, list(bias)] += self._device.upload(torch.tensor(list(bias.values())))
        if self._penalized:
            self._penalize(scores)
        if self._automata:
            forbid_tokens(scores, self._device.upload(torch.from_numpy(self._masks())))
        return scores

    def _masks(self) -> npt.NDArray[np.int32]:
        """Return the rows' token masks: int32 [n, ceil(vocab / 32)]. Rows without a structure allow all."""
        masks = np.full((len(self._sequences), len(self._automata[0][1].mask)), -1, np.int32)
        for i, automaton in self._automata:
            masks[i] = automaton.mask
        return masks

    def _count_tokens(self, vocab_size: int) -> None:
        params = [self._sequences[i].sampling for i in self._penalized]
        self._repetition = self._column([p.repetition_penalty for p in params])
        self._frequency = self._column([p.frequency_penalty for p in params])
        self._presence = self._column([p.presence_penalty for p in params])
        counts, in_prompt = [], []
        for i in self._penalized:
            sequence = self._sequences[i]
            prompt, output = np.split(sequence.token_ids, [sequence.num_prompt_tokens])
            counts.append(np.bincount(output, minlength=vocab_size))
            in_prompt.append(np.bincount(prompt, minlength=vocab_size) > 0)
        self._counts = self._device.upload(torch.from_numpy(np.stack(counts)).float())
        self._in_prompt = self._device.upload(torch.from_numpy(np.stack(in_prompt)))
        self._counted = [self._sequences[i].num_tokens for i in self._penalized]

    def _penalize(self, scores: Tensor) -> None:
        """Apply penalties as OpenAI and vLLM do: repetition counts prompt and output, the others the
        output."""
        for k, i in enumerate(self._penalized):
            sequence = self._sequences[i]
            for token_id in sequence.token_ids[self._counted[k] :]:
                self._counts[k, int(token_id)] += 1
            self._counted[k] = sequence.num_tokens
        rows = scores[self._penalized]
        seen = self._in_prompt | (self._counts > 0)
        repetition = torch.where(seen, self._repetition, 1.0)
        rows = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows -= self._frequency * self._counts + self._presence * (self._counts > 0)
        scores[self._penalized] = rows

    def _rows(self, rows: list[int]) -> Tensor:
        return self._device.upload(torch.tensor(rows, dtype=torch.long))

    def _column(self, values: list[float] | list[int]) -> Tensor:
        """float32 [n, 1]"""
        return self._device.upload(torch.tensor(values, dtype=torch.float32)[:, None])


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, list[TokenLogprobs | None]]:
    """logits: [n, vocab], row i of the batch's sequence i.

    Returns the tokens, int64 [n], on the logits' device, and n logprobs, or an empty list where none were
    requested. Logprobs wait for the GPU.
    """
    if batch.plain:
        return argmax_rows(logits), _NO_LOGPROBS
    chosen: list[Tensor] = []
    logprobs: list[TokenLogprobs | None] = [None] * len(logits)
    for first, end, group in batch.groups:
        rows = logits[first:end]
        if group.plain:
            chosen.append(argmax_rows(rows))
            continue
        raw = rows.float()
        # Those of a model in 16 bits are new already. Logprobs are of the model's own logits.
        in_place = raw is not rows and not group.logprob_rows
        tokens = _choose(group.adjust(raw, in_place=in_place), group)
        chosen.append(tokens)
        if group.logprob_rows:
            asked = group.logprob_rows
            for i, entry in zip(asked, describe(raw[asked], tokens[asked], group.num_logprobs), strict=True):
                logprobs[first + i] = entry
    return torch.cat(chosen), logprobs


def _choose(scores: Tensor, group: _Group) -> Tensor:
    """scores: float32 [n, vocab]. Returns int64 [n]."""
    if group.all_drawn:
        return draw(scores, group)
    tokens = argmax_rows(scores)
    if len(group.drawn_rows):
        tokens[group.drawn_rows] = draw(scores[group.drawn_rows], group)
    return tokens


def draw(scores: Tensor, group: _Group) -> Tensor:
    """scores: float32 [num_drawn, vocab]. Returns int64 [num_drawn].

    Applies temperature, min_p, top_k, top_p, in that order. A row's token depends only on its own parameters
    and its logits, not on the other rows. The token is the first of an exponential race (Gumbel): only the
    two foremost tokens decide, so that a change of the logits by rounding seldom changes the token. A
    search in the cumulative distribution has as many borders as tokens, and each of them moves.
    """
    scores = scores / group.temperature
    weights = scores.softmax(-1)
    if group.has_min_p or len(group.cut_rows):
        least = scores.amax(-1, keepdim=True) + group.min_p.log()
        if len(group.cut_rows):
            rows = group.cut_rows
            least[rows] = _least_kept(scores[rows], least[rows], group.top_k, group.top_p)
        weights *= scores >= least
    return argmax_rows(weights.div_(group.waits(scores.shape[-1])))


def _least_kept(scores: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest score that top_k and then top_p keep, at least ``floor``: all [n, 1]."""
    if scores.device.type == "cpu":
        ascending = torch.from_numpy(np.sort(scores.numpy(), axis=-1))  # 60 times as fast as torch.sort
    else:
        ascending = scores.sort(dim=-1).values
    vocab_size = scores.shape[-1]
    kept = torch.maximum(ascending.gather(-1, vocab_size - top_k), floor)
    weights = ascending.softmax(-1)
    weights *= ascending >= kept
    below = weights.cumsum(-1, dtype=torch.float64)
    first = torch.searchsorted(below, (1 - top_p) * below[:, -1:], right=True)
    return ascending.gather(-1, first.clamp_(max=vocab_size - 1))


def describe(raw: Tensor, tokens: Tensor, num_top: Rows[int]) -> list[TokenLogprobs]:
    """Return logprobs. raw: float32 [n, vocab] logits; tokens: int64 [n]; num_top: best tokens to add."""
    logprobs = raw.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    most = min(max(num_top, default=0), raw.shape[-1])
    top = logprobs.topk(most, dim=-1)
    columns = (chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    return [
        TokenLogprobs(logprob, rank, ids[:n], values[:n])
        for logprob, rank, ids, values, n in zip(*columns, num_top, strict=True)
    ]


def stream_keys(seeds: npt.NDArray[np.uint64], index: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """Return 32 random bits for each pair of uint64 seeds and index, by SplitMix64's finisher."""
    x = _mix(_mix(seeds + np.uint64(0x9E3779B97F4A7C15)) ^ _mix(index + np.uint64(0xD1B54A32D192ED03)))
    return (x >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exponential(keys: Tensor, vocab_size: int) -> Tensor:
    """Return exponential random numbers of mean 1, a function of key and token: float32 [n, vocab].

    keys: int32 [n, 1]. The smallest is 2^-32: tokens of a smaller probability are practically never drawn.
    """
    x = _token_hashes(vocab_size, keys.device) ^ keys
    # MurmurHash3's 32-bit finisher; torch has no logical shift.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - 2**32)
    # The upper 31 bits to (0, 1): below 1 in float32, too.
    bits = x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return bits.float().mul_((2**-23 - 1) * 2**-31).sub_(2**-32).log1p_().neg_()


@lru_cache(maxsize=8)
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """int32 [vocab]"""
    x = np.arange(1, vocab_size + 1, dtype=np.uint64)
    return torch.from_numpy((_mix(x) >> np.uint64(32)).astype(np.uint32).view(np.int32)).to(device)
