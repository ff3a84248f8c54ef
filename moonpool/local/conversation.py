"""The conversation that `moonpool up` begins with, and the table of what happened on its way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.client import Client, Message, Reply
from moonpool.errors import ApiError

TURNS = ("Who are you?", "Tell me about Moses.", "Go on.")
MAX_TOKENS = 96
# Fixed, so that the same checkpoint says the same thing on the same machine.
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 7}


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, what came back, and the conductor's account of it (its timeline's summary)."""

    question: str
    reply: Reply
    summary: dict[str, Any]


async def hold_conversation(client: Client, console: Console) -> list[Turn]:
    """Ask ``TURNS`` in one conversation, printing answers as they stream.

    Raises:
        ApiError: a request failed; what streamed before it has been printed.
    """
    turns: list[Turn] = []
    for question in TURNS:
        console.print(f"[bold]you[/]       {question}")
        console.print("[bold cyan]moonpool[/]  ", end="")
        reply = Reply()
        async with aclosing(_answer(client, turns, question, reply)) as pieces:
            async for text in pieces:
                console.out(text, end="", highlight=False)
        console.print()
        timeline = await client.timeline(reply.id)
        turns.append(Turn(question, reply, timeline["summary"]))
    return turns


async def _answer(
    client: Client, turns: Sequence[Turn], question: str, reply: Reply
) -> AsyncGenerator[str, None]:
    """The answer's pieces, by the chat API, or as plain text where the checkpoint knows no chats."""
    messages: list[Message] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.reply.text})
    messages.append({"role": "user", "content": question})
    try:
        async for text in client.chat(messages, reply, max_tokens=MAX_TOKENS, **SAMPLING):
            yield text
    except ApiError as error:
        if error.status != 400 or "template" not in str(error):
            raise
        prompt = "\n".join(message["content"] for message in messages) + "\n"
        async for text in client.complete(prompt, reply, max_tokens=MAX_TOKENS, **SAMPLING):
            yield text


def turns_table(turns: Sequence[Turn]) -> RenderableType:
    """A row a turn: where it ran, what the cache held and where, what moved, how fast; then why there."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("turn", "prefill", "decode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompt", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("found in", no_wrap=True)
    for heading in ("moved", "GB/s", "TTFT", "TPOT"):
        table.add_column(heading, justify="right", no_wrap=True)
    reasons = Table.grid(padding=(0, 2, 0, 0))
    for number, turn in enumerate(turns, 1):
        summary, usage = turn.summary, turn.reply.usage
        table.add_row(
            str(number),
            summary["prefill_node"],
            summary["decode_node"],
            str(usage["prompt_tokens"]),
            str(usage["prompt_tokens_details"]["cached_tokens"]),
            _sources(summary),
            _bytes(summary["transferred_nbytes"]),
            _rate(summary["transferred_nbytes"], summary["transfer_s"]),
            f"{summary['ttft_s'] * 1e3:.1f} ms",
            f"{summary['tpot_s'] * 1e3:.2f} ms",
        )
        reasons.add_row(f"turn {number}", summary["reason"], summary["detail"])
    note = Text(
        "prompt, cached, found in: tokens. moved: KV blocks, prefill node to decode node.", style="dim"
    )
    return Group(table, note, "", Text("placed there because", style="bold"), reasons)


def _sources(summary: dict[str, Any]) -> str:
    parts = (
        ("pool", "pool_tokens"),
        ("host", "host_tokens"),
        ("disk", "ssd_tokens"),
        ("peer", "fetched_tokens"),
    )
    return " ".join(f"{name} {summary[key]}" for name, key in parts if summary[key]) or "–"


def _bytes(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.0f} KiB" if nbytes else "–"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2g}" if nbytes and seconds > 0 else "–"
