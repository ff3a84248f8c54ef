"""A server under measurement: finds its model, sends it requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.bench.serve.client.answer import Answer, read_answer, read_json
from moonpool.bench.serve.client.http_client import Exchange, HttpClient
from moonpool.bench.serve.client.workload import Dialect
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

COMPLETIONS = "/v1/completions"


class RequestFailed(MoonpoolError):
    """A request of a measured case was answered with an error."""

    failure = FailureClass.REQUEST


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of a run in the order of their ends, failed ones too, and the wall time."""

    answers: Sequence[Answer]
    seconds: float


class Server:
    """An OpenAI-compatible server to measure. ``name``: in the report."""

    def __init__(self, name: str, http: HttpClient, dialect: Dialect) -> None:
        self.name = name
        self.http = http
        self.dialect = dialect

    @classmethod
    async def find(cls, name: str, http: HttpClient, *, model: str = "", plain: bool = False) -> Server:
        """``model`` empty: the first that the server lists. Raises ``RequestFailed``: it lists none."""
        if not model:
            status, content = read_json(await http.get("/v1/models"))
            if status != 200 or not content.get("data"):
                raise RequestFailed(f"{name} lists no model (status {status}): name one with --model")
            model = content["data"][0]["id"]
        return cls(name, http, Dialect(model, plain))

    async def send(self, prompt: Sequence[int], output_tokens: int, request_id: str = "") -> Exchange:
        """One streamed completion, raw."""
        headers = {"x-request-id": request_id} if request_id else None
        return await self.http.post(COMPLETIONS, self.dialect.body(prompt, output_tokens), headers)

    async def ask(self, prompt: Sequence[int], output_tokens: int, request_id: str = "") -> Answer:
        """One streamed completion, parsed. Raises ``RequestFailed``."""
        return self.answered(await self.send(prompt, output_tokens, request_id))

    def answered(self, exchange: Exchange) -> Answer:
        """What it answered. Raises ``RequestFailed``: an error."""
        answer = read_answer(exchange)
        if answer.error:
            raise RequestFailed(f"{self.name}: {answer.error}")
        return answer

    async def ask_all(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Outcome:
        """All at once, parsed when the last is complete. Raises ``RequestFailed``."""
        await self.http.warm(len(prompts))
        started = time.perf_counter()
        exchanges = await asyncio.gather(*(self.send(prompt, output_tokens) for prompt in prompts))
        seconds = time.perf_counter() - started
        return Outcome([self.answered(exchange) for exchange in exchanges], seconds)


def new_request_id() -> str:
    return f"bench-{uuid.uuid4().hex[:12]}"
