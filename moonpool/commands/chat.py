"""``moonpool chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from contextlib import aclosing
from typing import Any

import click
from rich.console import Console

from moonpool.client import Client, Message, Reply
from moonpool.commands.options import console as terminal
from moonpool.commands.options import run_with_client, url_option
from moonpool.errors import ApiError


@click.command("chat")
@url_option
@click.option("--model", default="", metavar="NAME", help="A model or LoRA adapter (default: the model).")
@click.option("--system", default="", metavar="TEXT", help="A system message.")
@click.option("--max-tokens", default=256, show_default=True)
@click.option("--temperature", default=0.7, show_default=True)
@click.argument("message", nargs=-1)
def chat_command(url: str, message: tuple[str, ...], **options: Any) -> None:
    """Talk to the model; with MESSAGE, get one answer."""
    run_with_client(url, lambda client: chat(client, terminal, first=" ".join(message), **options))


async def chat(
    client: Client, console: Console, *, system: str, first: str, model: str = "", **parameters: Any
) -> None:
    """Answer ``first`` and return; without it, converse until end of input. Ctrl-C stops one answer.

    model: the served name of a model or an adapter; empty: the server's first. parameters: of each request.

    Raises:
        ApiError: the first request failed; later failures are printed.
    """
    if model:
        parameters["model"] = model
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if first:
        messages.append({"role": "user", "content": first})
        await _answer(client, console, messages, parameters)
        return
    name = model or (await client.model())["id"]
    if sys.stdin.isatty():
        console.print(
            f"{name} at {client.url}. Ctrl-C stops an answer, Ctrl-D ends.", style="dim", markup=False
        )
    while (question := await _ask(console)) is not None:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            text = await _interruptible(client, console, messages, parameters)
        except ApiError as error:
            console.print(str(error), style="red", markup=False)
            messages.pop()  # the next request does not repeat it
        else:
            messages.append({"role": "assistant", "content": text})


async def _ask(console: Console) -> str | None:
    """Return the next line; None at the end of the input or on Ctrl-C."""
    prompt = "[bold]you[/] " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        # Blocks the loop on purpose: nothing else runs meanwhile, and readline needs the main thread.
        return console.input(prompt)
    return None


async def _interruptible(
    client: Client, console: Console, messages: list[Message], parameters: dict[str, Any]
) -> str:
    """Return the answer, or the part that had streamed at Ctrl-C."""
    reply = Reply()
    task = asyncio.ensure_future(_answer(client, console, messages, parameters, reply))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        console.print("[dim] (stopped)[/]")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return reply.text


async def _answer(
    client: Client,
    console: Console,
    messages: list[Message],
    parameters: dict[str, Any],
    reply: Reply | None = None,
) -> None:
    reply = reply or Reply()
    stream = client.chat(messages, reply, **parameters)
    try:
        async with aclosing(stream) as pieces:
            async for text in pieces:
                console.out(text, end="", highlight=False)
    finally:
        if reply.text:
            console.print()  # also before the sentence about what broke it off
    cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
    if console.is_terminal:
        console.print(
            f"[dim]{reply.usage['prompt_tokens']} prompt tokens, {cached} from cache; "
            f"{reply.usage['completion_tokens']} tokens; first after {reply.pieces_s[0] * 1e3:.0f} ms[/]"
            if reply.pieces_s
            else "[dim](empty answer)[/]"
        )
