"""Load with answers that are known before the first fault."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace

from moonpool.bench.serve.client.answer import Answer, AnswerInvalid, read_answer
from moonpool.bench.serve.client.http_client import ServerUnreachable
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed, Server, new_request_id
from moonpool.bench.serve.client.workload import Prompts

_GROUPS = 4  # of prompts with a common prefix
_GROUP_PROMPTS = 6
_PREFIX_TOKENS = 192
_PROMPT_TOKENS = 256
_OUTPUT_TOKENS = (32, 160)
_RETRY_PAUSE_S = 0.2


@dataclass(slots=True)
class Counts:
    """What became of the requests. ``different`` has the request ids."""

    same: int = 0
    different: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    answers: list[Answer] = field(default_factory=list)  # all but hung ones

    @property
    def ttft_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.answers if not answer.error]

    @property
    def total(self) -> int:
        return self.same + len(self.different) + self.errors.total() + self.hung


class KnownLoad:
    """Prompts with their answers: half greedy, half sampled with a seed. Both must be repeatable."""

    def __init__(
        self, server: Server, seed: int, hung_after_s: float, group_prompts: int = _GROUP_PROMPTS
    ) -> None:
        """hung_after_s: a request that has not ended by then counts as hung and is given up. group_prompts:
        prompts with the same prefix."""
        self.server = server
        self._hung_after_s = hung_after_s
        rng = random.Random(f"chaos load {seed}")
        self._bodies: list[bytes] = []
        for group in range(_GROUPS):
            prompts = Prompts(seed, f"chaos {group}", _PREFIX_TOKENS)
            for number in range(group_prompts):
                prompt, length = prompts.draw(_PROMPT_TOKENS), rng.randint(*_OUTPUT_TOKENS)
                sampled = {"temperature": 0.9, "seed": rng.randrange(1 << 31)}
                more = sampled if number % 2 else {}
                self._bodies.append(server.dialect.body(prompt, length, **more))
        self._expected: list[tuple[int, ...]] = []

    def at(self, server: Server) -> KnownLoad:
        """The same load at another conductor of the cluster: the answers that are known are its own, too."""
        other = copy(self)
        other.server = server
        return other

    async def learn(self) -> None:
        """Ask each prompt twice, without faults. Raises ``RequestFailed``: an error, or two answers."""
        for body in self._bodies:
            first, second = [await self._ask(body) for _ in range(2)]
            for answer in (first, second):
                if answer.error:
                    raise RequestFailed(f"before the first fault: {answer.error}")
            if first.token_ids != second.token_ids:
                raise RequestFailed(f"two answers to one prompt without a fault: {first.id}, {second.id}")
            self._expected.append(first.token_ids)

    async def run(self, streams: int, until: asyncio.Event, rng: random.Random, counts: Counts) -> None:
        """Keep ``streams`` requests running until the event is set; those under way are finished."""

        async def work() -> None:
            while not until.is_set():
                if not await self._once(rng.randrange(len(self._bodies)), counts):
                    await asyncio.sleep(_RETRY_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(work())

    async def run_once(self, counts: Counts) -> None:
        """Every prompt once, one after the other."""
        for number in range(len(self._bodies)):
            await self._once(number, counts)

    async def _once(self, number: int, counts: Counts) -> bool:
        """Returns whether the answer was complete."""
        try:
            async with asyncio.timeout(self._hung_after_s):
                answer = await self._ask(self._bodies[number])
        except TimeoutError:
            counts.hung += 1
            return False
        counts.answers.append(answer)
        if answer.error:
            counts.errors[answer.error] += 1
            return False
        if answer.token_ids == self._expected[number]:
            counts.same += 1
        else:
            counts.different.append(answer.id)
        return True

    async def _ask(self, body: bytes) -> Answer:
        request_id, sent_s = new_request_id(), time.perf_counter()
        try:
            answer = read_answer(await self.server.http.post(COMPLETIONS, body, {"x-request-id": request_id}))
        except (ServerUnreachable, AnswerInvalid) as error:
            return Answer(sent_s, time.perf_counter(), error=str(error), id=request_id)
        # So that its timeline is found, whatever came of it.
        return replace(answer, id=request_id)
