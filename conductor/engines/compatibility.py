"""Whether an engine of another project can serve a conductor's model."""

from __future__ import annotations

from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.kvstore.index.redis.engine_facts import EngineFacts, facts_of
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt


def why_not(record: NodeRecord, model: ServedModel) -> str:
    """The reason, as a sentence; empty: it can, or it is no engine that takes requests."""
    try:
        facts = facts_of(record)
    except RecordCorrupt as error:
        return str(error)
    return "" if facts is None else _why_not(facts, model)


def _why_not(facts: EngineFacts, model: ServedModel) -> str:
    if facts.block_size != model.block_size:
        return (
            f"its blocks have {facts.block_size} tokens, this conductor's {model.block_size}: start it with "
            f"--block-size {model.block_size}, or this with engine.block_size={facts.block_size}"
        )
    if facts.vocab_size < model.vocab_size:
        return f"it has a vocabulary of {facts.vocab_size} tokens and {model.name} of {model.vocab_size}"
    if facts.max_model_len < model.max_model_len:
        return (
            f"it serves {facts.max_model_len} tokens, this conductor promises {model.max_model_len}: start "
            f"it with a larger --max-model-len, or this with model.max_model_len={facts.max_model_len}"
        )
    return facts.keys_differ()
