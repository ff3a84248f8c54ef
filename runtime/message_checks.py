"""What every message from another process must keep: ranges of its numbers, lengths of all that repeats.

``MOST`` has the greatest length of every repeated field, map and ``bytes`` of the services' messages. A test
finds fields without one. Texts without one have at most ``TEXT_CHARS``. The RPC boundary applies both tables
to every request and reply: a message of 64 MiB may be well-formed and still name a hundred million blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from moonpool.runtime.number_checks import BY_FIELD, FINITE, NumberOutOfRange, Range

TEXT_CHARS = 4096  # names, addresses, ids
ERROR_CHARS = 64 << 10  # errors that quote others
_TOKENS = 8 << 20  # of one prompt: beyond the longest context of any model
_BLOCKS = 1 << 20  # of one call: such a prompt in blocks of 8 tokens
_KEYS_NBYTES = 16 * _BLOCKS
_OBJECTS = 1 << 16  # of one call; the client sends a few hundred
_PLACES = 1 << 10  # copies of an object, each on another node
_NODES = 1 << 16
_ADAPTERS = 1 << 12  # of one page
_DESCRIPTOR_NBYTES = 4096  # see transfer.connections.descriptor
_FINGERPRINT_NBYTES = 64
_SMALL_OBJECT_NBYTES = 64 << 10  # larger ones are not sent with the call
_LOGPROBS = 1 << 18  # the largest vocabularies
_LINE_NBYTES = 64 << 20  # commands, reports and batches of ranks

MOST: Mapping[str, int] = {
    "moonpool.Sampling.logit_bias": _LOGPROBS,
    "moonpool.Sampling.stop_token_ids": 4096,
    "moonpool.Work.token_ids": 4 * _TOKENS,
    "moonpool.Work.root_key": 16,
    "moonpool.Work.block_keys": _KEYS_NBYTES,
    "moonpool.TokenLogprobs.top_ids": _LOGPROBS,
    "moonpool.TokenLogprobs.top_logprobs": _LOGPROBS,
    "moonpool.KvAddress.agent": _DESCRIPTOR_NBYTES,
    "moonpool.KvAddress.layout_fingerprint": _FINGERPRINT_NBYTES,
    "moonpool.KvAddress.ranks": 4096,
    "moonpool.RankMemory.agent": _DESCRIPTOR_NBYTES,
    "moonpool.BlockSpans.region": _BLOCKS,
    "moonpool.BlockSpans.offset": _BLOCKS,
    "moonpool.BlockSpans.checksum": _BLOCKS,
    "moonpool.ExpertLoadReply.rows": 1 << 20,
    "moonpool.PlaceExpertsRequest.placement": 1 << 22,  # 64 layers of 512 experts on 64 ranks: 0.3 MB
    "moonpool.PlaceExpertsReply.not_kept": ERROR_CHARS,
    "moonpool.NodeStatus.tiers": 64,
    "moonpool.LeaseRequest.keys": _KEYS_NBYTES,
    "moonpool.BlockListing.changes": 2 * _KEYS_NBYTES,
    "moonpool.ReplicateRequest.keys": _KEYS_NBYTES,
    "moonpool.EvictRequest.keys": _KEYS_NBYTES,
    "moonpool.HintRequest.keys": _KEYS_NBYTES,
    "moonpool.PrefillReply.prompt_logprobs": _TOKENS,
    "moonpool.PrefillReply.chunks": _BLOCKS,
    "moonpool.PrefillReply.fetch_error": ERROR_CHARS,
    "moonpool.TokenOut.error": ERROR_CHARS,
    "moonpool.KvReceived.reads": _BLOCKS,
    "moonpool.KvChunk.token_ids": 4 * _TOKENS,
    "moonpool.StepTokens.tokens": 1 << 20,
    "moonpool.RankReport.line": _LINE_NBYTES,
    "moonpool.RankDone.words": 64,
    "moonpool.RankCommand.line": _LINE_NBYTES,
    "moonpool.RankStep.batch": _LINE_NBYTES,
    "moonpool.ObjectInfo.key": 16,
    "moonpool.ObjectInfo.shape": 64,
    "moonpool.ObjectRecord.owner": 16,
    "moonpool.ObjectRecord.places": _PLACES,
    "moonpool.StoredObject.owner": 16,
    "moonpool.StoredObject.data": _SMALL_OBJECT_NBYTES,
    "moonpool.BeginRequest.owner": 16,
    "moonpool.BeginRequest.objects": _OBJECTS,
    "moonpool.BeginRequest.data": _OBJECTS,
    "moonpool.BeginRequest.source": 16,
    "moonpool.BeginRequest.chunks": _OBJECTS,
    "moonpool.CommitRequest.written": _OBJECTS,
    "moonpool.WrittenChunks.checksum": _BLOCKS,
    "moonpool.PutReply.steps": _OBJECTS,
    "moonpool.PutStep.error": ERROR_CHARS,
    "moonpool.AbortRequest.put_id": _OBJECTS,
    "moonpool.AbortRequest.owner": 16,
    "moonpool.AbortRequest.storage": _OBJECTS,
    "moonpool.PublishRequest.owner": 16,
    "moonpool.PublishRequest.objects": _OBJECTS,
    "moonpool.PublishObject.key": 16,
    "moonpool.PublishObject.places": _PLACES,
    "moonpool.PublishReply.error": _OBJECTS,
    "moonpool.OpenRequest.owner": 16,
    "moonpool.OpenRequest.objects": _OBJECTS,
    "moonpool.OpenRequest.close_lease_id": _OBJECTS,
    "moonpool.OpenObject.key": 16,
    "moonpool.OpenReply.objects": _OBJECTS,
    "moonpool.OpenedObject.lease_id": _OBJECTS,
    "moonpool.OpenedObject.places": _PLACES,
    "moonpool.OpenedObject.data": _SMALL_OBJECT_NBYTES,
    "moonpool.CloseRequest.lease_id": _OBJECTS,
    "moonpool.FindRequest.owner": 16,
    "moonpool.FindRequest.keys": 16 * _OBJECTS,
    "moonpool.FindReply.found": _OBJECTS,
    "moonpool.FindReply.exists": _OBJECTS,
    "moonpool.CheckRequest.owner": 16,
    "moonpool.CheckRequest.objects": _OBJECTS,
    "moonpool.RemoveRequest.owner": 16,
    "moonpool.RemoveRequest.objects": _OBJECTS,
    "moonpool.RemoveReply.removed": _OBJECTS,
    "moonpool.RemoveReply.storage": _OBJECTS,
    "moonpool.ReconcileRequest.owner": 16,
    "moonpool.ReconcileRequest.keys": 16 * _OBJECTS,
    "moonpool.CopyRequest.owner": 16,
    "moonpool.CopyRequest.key": 16,
    "moonpool.ListRequest.owner": 16,
    "moonpool.ListReply.objects": _OBJECTS,
    "moonpool.UsageRequest.owner": 16,
    "moonpool.UsageReply.tiers": 64,
    "moonpool.ListNodesReply.nodes": _NODES,
    "moonpool.ListAdaptersReply.adapters": _ADAPTERS,
    "moonpool.StartNodeRequest.settings": 64,
    "moonpool.SettleRequest.settings": 64,
    "moonpool.LoadReport.loads": _NODES,
    "moonpool.LoadReport.open": _NODES,
    "moonpool.LoadReport.tenants": _NODES,
    "moonpool.BookRequest.prefills": _NODES,
    "moonpool.BookRequest.decodes": _NODES,
}
MOST_EACH: Mapping[str, int] = {
    "moonpool.BeginRequest.data": _SMALL_OBJECT_NBYTES,
    "moonpool.PublishReply.error": ERROR_CHARS,
}
"""The greatest length of each element of a repeated ``bytes``, and of texts longer than ``TEXT_CHARS``."""


def check_message(message: Message) -> None:
    """Check all numbers and lengths of a message and of the messages in it. Raises ``NumberOutOfRange``."""
    if (plan := _plan(message.DESCRIPTOR)) is not None:
        plan.check(message)


class _Plan:
    """What to check in messages of a type: (name, full name, limit) of fields, (name, plan) of messages.

    Every token is checked on its way: the bounds of single numbers stand apart, which takes a quarter off."""

    __slots__ = ("lengths", "lengths_each", "many_messages", "many_numbers", "messages", "numbers")

    def __init__(self) -> None:
        self.numbers: list[tuple[str, float, float, str, Range]] = []
        self.many_numbers: list[tuple[str, str, Range]] = []
        self.lengths: list[tuple[str, str, int]] = []
        self.lengths_each: list[tuple[str, str, int]] = []
        self.messages: list[tuple[str, _Plan]] = []
        self.many_messages: list[tuple[str, _Plan]] = []

    def check(self, message: Any) -> None:
        # First: what is too long is not looked through.
        for name, field, most in self.lengths:
            if (length := len(getattr(message, name))) > most:
                raise _too_long(field, length, most)
        for name, field, most in self.lengths_each:
            for element in getattr(message, name):
                if len(element) > most:
                    raise _too_long(f"an element of {field}", len(element), most)
        for name, low, high, field, allowed in self.numbers:
            if not low <= (value := getattr(message, name)) <= high:
                raise NumberOutOfRange(field, value, allowed)
        for name, field, allowed in self.many_numbers:
            values = getattr(message, name)
            for value in values.values() if hasattr(values, "values") else values:
                if value not in allowed:
                    raise NumberOutOfRange(field, value, allowed)
        for name, plan in self.messages:
            if message.HasField(name):
                plan.check(getattr(message, name))
        for name, plan in self.many_messages:
            for each in getattr(message, name):
                plan.check(each)


def _too_long(field: str, length: int, most: int) -> NumberOutOfRange:
    return NumberOutOfRange(f"the length of {field}", length, Range(0, most))


_plans: dict[str, _Plan | None] = {}


def _plan(descriptor: Any) -> _Plan | None:
    """The plan of a message type; None: there is nothing to check. No message contains its own type."""
    name: str = descriptor.full_name
    if name not in _plans:
        plan = _Plan()
        for field in descriptor.fields:
            _add(plan, field)
        _plans[name] = plan if any(getattr(plan, part) for part in _Plan.__slots__) else None
    return _plans[name]


def _add(plan: _Plan, field: Any) -> None:
    entry, full_name, repeated = field.message_type, field.full_name, field.is_repeated
    has_length = entry is None and field.cpp_type == field.CPPTYPE_STRING  # text or bytes
    if repeated or has_length:
        plan.lengths.append((field.name, full_name, MOST.get(full_name, TEXT_CHARS)))
    if repeated and has_length:
        plan.lengths_each.append((field.name, full_name, MOST_EACH.get(full_name, TEXT_CHARS)))
    if entry is not None and not entry.GetOptions().map_entry:
        if (inner := _plan(entry)) is not None:
            (plan.many_messages if repeated else plan.messages).append((field.name, inner))
        return
    value = field if entry is None else entry.fields_by_name["value"]
    # Without a range of its own a number must at least be finite.
    fallback = FINITE if value.cpp_type in (value.CPPTYPE_DOUBLE, value.CPPTYPE_FLOAT) else None
    if (allowed := BY_FIELD.get(full_name, fallback)) is not None:
        if repeated:
            plan.many_numbers.append((field.name, full_name, allowed))
        else:
            plan.numbers.append((field.name, allowed.low, allowed.high, full_name, allowed))
