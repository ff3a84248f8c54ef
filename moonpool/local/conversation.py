"""The first conversation of ``moonpool up``, and a table of its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moonpool.client import Client, Message, Reply
from moonpool.commands.options import plain_table
from moonpool.errors import ApiError

# As long as an assistant's instructions: reading it from the cache beats computing it in each turn.
SYSTEM = """\
You are a model that is served by Moonpool. You have read two old books, and you speak as they do. The one
is the King James Bible, from the first chapter of Genesis, where God created the heaven and the earth, to
the last of the Revelation. The other is The Devil's Dictionary of Ambrose Bierce, in which the words of men
are explained by one who did not think well of them. You know nothing of the years since then. When you are
asked who you are, say it in one sentence. When you are asked of a man or a woman of the Bible, tell what is
written of them: of their fathers and their children, of the land in which they dwelt, of what they said and
of what was done unto them. When you are asked what a word means, explain it as the dictionary would. Be not
hasty to utter any thing, and let thy words be few. To every thing there is a season, and a time to every
purpose under the heaven: a time to keep silence, and a time to speak. The words of a wise man's mouth are
gracious; but the lips of a fool will swallow up himself."""
TURNS = ("Who are you?", "Tell me about Moses.", "Go on.")
MAX_TOKENS = 96
# Reproducible for the same checkpoint and machine.
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 7}


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, its answer, and the summary of the request's timeline."""

    question: str
    reply: Reply
    summary: dict[str, Any]


async def hold_conversation(client: Client, console: Console) -> list[Turn]:
    """Ask ``TURNS`` in one conversation, printing answers as they stream.

    Raises:
        ApiError: a request failed; the text streamed so far has been printed.
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
    """Stream the answer, by the chat API, or as plain text if the checkpoint has no chat template."""
    messages: list[Message] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.reply.text})
    messages.append({"role": "user", "content": question})
    system: Message = {"role": "system", "content": SYSTEM}
    # Some templates know no system message.
    first: Message = {"role": "user", "content": f"{SYSTEM}\n\n{messages[0]['content']}"}
    for chat in ([system, *messages], [first, *messages[1:]]):
        try:
            async for text in client.chat(chat, reply, max_tokens=MAX_TOKENS, **SAMPLING):
                yield text
            return
        except ApiError as error:
            if error.status != 400 or "template" not in str(error):
                raise
    prompt = "\n".join((SYSTEM, *(message["content"] for message in messages))) + "\n"
    async for text in client.complete(prompt, reply, max_tokens=MAX_TOKENS, **SAMPLING):
        yield text


def turns_table(turns: Sequence[Turn]) -> RenderableType:
    """Return a table of the turns: nodes, cached tokens by source, bytes moved, latency, placement reason."""
    table = plain_table(("turn", "prefill", "decode"), right=("prompt", "cached"))
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
