"""Commands and scripts run on the index's Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoScriptError, RedisClusterException, RedisError

from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.lua_scripts import Script

# What uvloop raises, not OSError as others do, where a connection broke before the command is written.
_CLOSED = "the handler is closed"


class RedisCalls:
    """Every method raises ``IndexUnavailable`` if Redis does not answer within ``timeout_s``; the call may
    have taken effect."""

    def __init__(self, redis: Any, timeout_s: float) -> None:
        """``redis``: a ``redis.asyncio`` Redis or RedisCluster without decoded responses; not closed here."""
        self._redis = redis
        self._timeout_s = timeout_s

    async def run(self, name: str, script: Script, keys: list[str], args: Sequence[object]) -> Any:
        """Run a script on keys of this namespace. ``name`` is for messages."""
        try:
            return await self.command("EVALSHA", script.sha, len(keys), *keys, *args, name=name)
        except IndexUnavailable as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await self.command("EVAL", script.text, len(keys), *keys, *args, name=name)

    async def run_all(
        self, name: str, script: Script, calls: Sequence[tuple[list[str], Sequence[object]]]
    ) -> list[Any]:
        """``run`` with each pair of keys and arguments. Returns the replies, and ``IndexUnavailable`` for
        those that failed."""

        async def one(call: tuple[list[str], Sequence[object]]) -> Any:
            try:
                return await self.run(name, script, *call)
            except IndexUnavailable as error:
                return error

        if len(calls) == 1:
            return [await one(calls[0])]
        if isinstance(self._redis, RedisCluster):
            return await asyncio.gather(*map(one, calls))
        # One write and one turn of the loop for all.
        pipeline = self._redis.pipeline(transaction=False)
        for keys, args in calls:
            pipeline.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
        try:
            replies = await self._answered(name, 0.0, pipeline.execute(raise_on_error=False))
        except IndexUnavailable as error:
            return [error] * len(calls)
        for number, (reply, call) in enumerate(zip(replies, calls, strict=True)):
            if isinstance(reply, NoScriptError):
                replies[number] = await one(call)
            elif isinstance(reply, RedisError):
                replies[number] = _unavailable(name, reply)
        return list(replies)

    async def command(self, *command: object, name: str = "", extra_s: float = 0.0) -> Any:
        """Run one command on keys of this namespace. ``extra_s``: in which Redis itself may wait."""
        return await self._answered(name or str(command[0]), extra_s, self._redis.execute_command(*command))

    async def _answered(self, name: str, extra_s: float, asking: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                reply = await asking
        except (RedisError, RedisClusterException, OSError, TimeoutError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            _raise_if_cancelled(task, cancels)
            raise _unavailable(name, error) from error
        _raise_if_cancelled(task, cancels)
        return reply


def pairs(reply: Any) -> list[tuple[bytes, bytes]]:
    """The fields and values of an answer to HGETALL or HSCAN: a mapping or a flat list."""
    if isinstance(reply, Mapping):
        return list(reply.items())
    return list(zip(reply[::2], reply[1::2], strict=True))


def _unavailable(name: str, error: Exception) -> IndexUnavailable:
    found = IndexUnavailable(name, f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def _raise_if_cancelled(task: asyncio.Task[Any], cancels: int) -> None:
    """redis-py swallows a cancellation while it connects: raise it here."""
    if task.cancelling() > cancels:
        raise asyncio.CancelledError
