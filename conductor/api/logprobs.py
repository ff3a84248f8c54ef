"""Log probabilities in the two shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.conductor.api.choice import TokenEntry
from moonpool.conductor.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI's and vLLM's clients know this number for "never".
LOWEST = -9999.0


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """Parallel lists; ``top_logprobs`` maps a token's text to its logprob and always has the token itself."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            tops.append(None)
            continue
        top = {token_label(i, tokenizer): _finite(value) for i, value in entry.logprobs.top}
        top.setdefault(token_label(entry.token_id, tokenizer), _finite(entry.logprobs.logprob))
        tops.append(top)
    return {
        "tokens": [token_label(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [_finite(entry.logprobs.logprob) if entry.logprobs else None for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """One object a token; its bytes are true even where its text is half a character."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_label(token_id, tokenizer),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        describe(entry.token_id, entry.logprobs.logprob)
        | {"top_logprobs": [describe(i, value) for i, value in entry.logprobs.top]}
        for entry in entries
        if entry.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def token_label(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text; bytes that are no text are spelled out as OpenAI does: ``bytes:\\xe4\\xbd``."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
