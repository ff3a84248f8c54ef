"""Answers of the Responses API: one object, or its events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson

from moonpool.conductor.api.answer import Answer, Outcome, Usage
from moonpool.conductor.api.choice import Choice, Delta, TokenEntry

Item = dict[str, Any]

ENDS: Final = (b"event: response.completed\n", b"event: response.incomplete\n")
"""What the last event of a stream begins with."""


class ResponseAnswer(Answer):
    """Items of the output come one after another: the text, then the calls."""

    id_prefix = "resp_"
    whole_object = chunk_object = "response"
    text_open = text_close = b""
    repeats_text = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.about: Item = {}  # fields of the request that its response repeats
        self.outcome = Outcome()
        self.keep: Callable[[Item], Awaitable[None]] | None = None  # called with the answer as a message
        self._items: list[Item] = []
        self._number = 0  # of the next event
        self._unfinished = False  # the last item is not complete

    # ------------------------------------------------------------------ one object

    def fields(self, choices: Sequence[tuple[Choice, Outcome]], usage: Usage) -> Item:
        ((_, self.outcome),) = choices
        self._items = self._items_of(self.outcome)
        return self._response(usage)

    def logprobs(self, entries: Sequence[TokenEntry]) -> Item:
        raise AssertionError("the Responses API is not asked for logprobs")

    def choice(self, index: int, outcome: Outcome) -> Item:
        raise AssertionError("a response has no choices")

    # ------------------------------------------------------------------ events

    def opening(self, index: int) -> bytes:
        return b""  # asked for after the first ``chunk``, which has it

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        events = b""
        if not self._number:
            response = self._response(None)
            events += self._event("response.created", response=response)
            events += self._event("response.in_progress", response=response)
        self.outcome.add(delta)
        # The rest of the open call comes first: text closes it.
        num_open = next((i for i, call in enumerate(delta.calls) if call.name), len(delta.calls))
        for call in delta.calls[:num_open]:
            events += self._more_arguments(call.arguments)
        if delta.text:
            if not self._unfinished or self._items[-1]["type"] != "message":
                events += self._close() + self._begin_text()
            self._items[-1]["content"][0]["text"] += delta.text
            events += self._event(
                "response.output_text.delta", **self._place, content_index=0, delta=delta.text, logprobs=[]
            )
        for call in delta.calls[num_open:]:
            if call.name:
                item = self._call_item(call.index, call.name)
                events += self._close() + self._begin(item)
            events += self._more_arguments(call.arguments)
        return events

    def ending(self, usage: Usage, *, include_usage: bool, explained: Sequence[Item] | None) -> bytes:
        events = self._close(self._ended_as)
        written = self._response(usage)
        if explained is not None:
            written["moonpool"] = explained
        return events + self._event(f"response.{written['status']}", response=written)

    async def finish(self) -> None:
        # The next request may follow at once, at another conductor.
        if self.keep is not None and self.outcome.finish_reason is not None:
            await self.keep(self._message())

    def _message(self) -> Item:
        """The answer as a message of the conversation."""
        calls = [self._call(0, call) for call in self.outcome.calls]
        content = "".join(self.outcome.text)
        message: Item = {"role": "assistant", "content": content}
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    # ------------------------------------------------------------------ items

    @property
    def _ended_as(self) -> str:
        """The status of the response, and of its last item: the limit cuts that one off."""
        return "incomplete" if self.outcome.finish_reason == "length" else "completed"

    def _items_of(self, outcome: Outcome) -> list[Item]:
        items, text = [], "".join(outcome.text)
        if text or not outcome.calls:
            items.append(self._text_item(text, "completed"))
        for call in outcome.calls:
            item = self._call_item(call.index, call.name)
            items.append(item | {"arguments": call.arguments, "status": "completed"})
        items[-1]["status"] = self._ended_as
        return items

    def _text_item(self, text: str, status: str) -> Item:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{self._id}", "status": status}
        return head | {"role": "assistant", "content": content}

    def _call_item(self, index: int, name: str) -> Item:
        call_id = self.call_id(0, index)
        return {
            "type": "function_call",
            "id": f"fc_{call_id.removeprefix('call_')}",
            "call_id": call_id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }

    @property
    def _place(self) -> Item:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, item: Item) -> bytes:
        self._items.append(item)
        self._unfinished = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _begin_text(self) -> bytes:
        item = self._text_item("", "in_progress")
        part, begun = item["content"][0], self._begin(item | {"content": []})
        self._items[-1] = item
        return begun + self._event("response.content_part.added", **self._place, content_index=0, part=part)

    def _more_arguments(self, arguments: str) -> bytes:
        """More of the open call."""
        if not arguments:
            return b""
        self._items[-1]["arguments"] += arguments
        return self._event("response.function_call_arguments.delta", **self._place, delta=arguments)

    def _close(self, status: str = "completed") -> bytes:
        """The end of the item that is open, if one is."""
        if not self._unfinished:
            return b""
        self._unfinished = False
        item, events = self._items[-1], b""
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events += self._event(
                "response.output_text.done", **self._place, content_index=0, text=part["text"], logprobs=[]
            )
            events += self._event("response.content_part.done", **self._place, content_index=0, part=part)
        else:
            events += self._event(
                "response.function_call_arguments.done",
                **self._place,
                name=item["name"],
                arguments=item["arguments"],
            )
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _response(self, usage: Usage | None) -> Item:
        """The response as it is now. ``usage``: None: it has not ended."""
        status = "in_progress" if usage is None else self._ended_as
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": status,
            "output": self._items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None
            if usage is None
            else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **self.about,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
