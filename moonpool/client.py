"""A small client of a conductor's API, for the command line. Programs use any OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
from yarl import URL

from moonpool.errors import ApiError
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.security import process
from moonpool.runtime.security.https import client_context
from moonpool.runtime.security.process import Security

LAST_EVENT_ID = "Last-Event-ID"
RESUME_S: Final = 30.0
"""How long a stream that broke is asked for again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# Statuses of a conductor that ends or is full, and of a load balancer without one.
_TRY_AGAIN = (0, 429, 502, 503)
API_KEY_VARIABLE = "MOONPOOL_API_KEY"
Message = dict[str, str]


@dataclass(slots=True)
class Reply:
    """A streamed answer. ``pieces_s``: arrival of each piece of text, in seconds after the request."""

    id: str = ""
    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    pieces_s: list[float] = field(default_factory=list)
    num_resumed: int = 0  # how often it was asked for again after its connection broke


@dataclass(slots=True)
class Turn:
    """Which conductor is asked next for a stream, and from where on. ``last_id``: empty before its first."""

    num_places: int
    place: int = 0
    last_id: str = ""
    pause_s: float = 0.0
    _num_failures: int = 0
    _since_s: float = 0.0

    def got(self, event_id: str) -> None:
        """An event has come."""
        self.last_id, self._num_failures = event_id or self.last_id, 0

    def next(self, now_s: float) -> bool:
        """The stream broke, or was refused. False: give up."""
        self._since_s = self._since_s if self._num_failures else now_s
        self.pause_s = min(_FIRST_PAUSE_S * 2**self._num_failures, _LONGEST_PAUSE_S)
        self._num_failures += 1
        self.place = (self.place + 1) % self.num_places
        if not self.last_id:  # nothing came: each is asked once
            return self._num_failures < self.num_places
        return now_s - self._since_s < RESUME_S


_LOAD_S = 70.0  # nodes read an adapter's files meanwhile
_NAMES_DIFFER = (62, 64)  # OpenSSL: X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_CHANGE_S = 120.0  # a provider makes pods, and nodes hand prefixes on


class Client:
    """``async with Client(url)``. Every method raises ``ApiError``: no answer, or an error of the API."""

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.perf_counter,
        *,
        api_key: str = "",
        security: Security | None = None,
        ca: str = "",
        others: Sequence[str] = (),
    ) -> None:
        """``others``: URLs of other conductors of the cluster, where streams go on if this one ends.
        ``api_key``: empty for that in ``MOONPOOL_API_KEY``. Without either, calls are signed with the key
        of ``security``; by default with the one that the process was given, and those to this machine else
        with the key of this user's local clusters.
        ``ca``: file of the authorities to trust; empty: see ``runtime.security.https``.

        Raises ``ConfigError``: a URL is wrong, or the key.
        """
        self.url = _base_of(url)
        self._urls = [self.url, *map(_base_of, others)]
        self._clock = clock
        self._api_key = api_key or os.environ.get(API_KEY_VARIABLE, "")
        if security is None:
            security = process.given()
        # A token's MAC goes to no other machine unasked: its receiver could try weak cluster keys.
        if security is None and loopback_only(URL(url).host or ""):
            security = process.current()
        self._security = security
        self._session = aiohttp.ClientSession(
            read_bufsize=1 << 22,  # an event of /v1/live is one line
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            trust_env=False,
            connector=connector(self.url, ca),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def _authorization(self, method: str, url: str) -> dict[str, str]:
        """The headers that prove who calls ``url``; none: there is no key."""
        if self._api_key:
            return {"Authorization": f"Bearer {self._api_key}"}
        token = self._security.token(f"{method} {URL(url).raw_path_qs}") if self._security else ""
        return {"Authorization": f"Moonpool {token}"} if token else {}

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Have all nodes serve the LoRA adapter in the directory ``path`` as ``name``."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": replace}
        await self._read("/v1/load_lora_adapter", "POST", body, timeout_s=_LOAD_S)

    async def unload_adapter(self, name: str) -> None:
        """Have all nodes forget a LoRA adapter. Requests that have begun finish with it."""
        await self._read("/v1/unload_lora_adapter", "POST", {"lora_name": name}, timeout_s=_LOAD_S)

    async def cluster(self) -> dict[str, Any]:
        return await self._get("/v1/cluster", "nodes")

    async def about(self) -> dict[str, Any]:
        """The conductor's code, machine and options."""
        return await self._get("/v1/about")

    async def index_blocks(self, node_id: str) -> bytes:
        """Return a node's blocks in the conductor's mirror, encoded as ``kvstore.index.redis.changes``."""
        return await self._read(f"/v1/index/{quote(node_id, safe='')}")

    async def fleet(self, model: str = "") -> dict[str, Any]:
        """Return the nodes of a model (empty: the first one), as the index and the provider know them."""
        return await self._get(f"/v1/fleet{_of_model(model)}", "nodes")

    async def scale(self, role: str, count: int, model: str = "") -> dict[str, Any]:
        """Have the provider run ``count`` nodes of ``role`` of a model (empty: the first one); return those
        asked to start and to stop."""
        path = f"/v1/fleet/scale/{quote(role, safe='')}/{count}{_of_model(model)}"
        return await self._post(path, timeout_s=_CHANGE_S)

    async def switch(self, node_id: str, role: str) -> dict[str, Any]:
        """Have a node become a prefill or decode node, or one of both."""
        path = f"/v1/fleet/switch/{quote(node_id, safe='')}/{quote(role, safe='')}"
        return await self._post(path, timeout_s=_CHANGE_S)

    async def switch_model(self, node_id: str, model: str) -> dict[str, Any]:
        """Have a node drain, and serve another model of the cluster. Returns at once; see ``fleet``."""
        path = f"/v1/fleet/switch/{quote(node_id, safe='')}/model/{quote(model, safe='')}"
        return await self._post(path, timeout_s=_CHANGE_S)

    async def drain(self, node_id: str) -> dict[str, Any]:
        """Have a node finish its requests and end. Returns at once."""
        return await self._post(f"/v1/fleet/drain/{quote(node_id, safe='')}", timeout_s=_CHANGE_S)

    async def rollout(self, settings: Sequence[str], watch_s: float) -> dict[str, Any]:
        """Begin to replace all nodes by ones with these settings; see ``rollout_status``."""
        query = "&".join([f"watch_s={watch_s:g}", *(f"set={quote(one, safe='')}" for one in settings)])
        return await self._post(f"/v1/fleet/rollout?{query}", timeout_s=_CHANGE_S)

    async def rollout_status(self) -> dict[str, Any]:
        return await self._get("/v1/fleet/rollout")

    async def abort_rollout(self) -> dict[str, Any]:
        """Roll back what was replaced. Returns at once."""
        return await self._post("/v1/fleet/rollout/abort")

    async def canaries(self) -> list[dict[str, Any]]:
        """Return the latest canary of each model: its counts, and while it runs what they say."""
        found: list[dict[str, Any]] = (await self._get("/v1/fleet/canary", "data"))["data"]
        return found

    async def start_canary(
        self,
        name: str,
        candidate: str,
        share: float,
        *,
        tenants: Sequence[str] = (),
        least: int | None = None,
        auto: bool = False,
    ) -> dict[str, Any]:
        """Send ``share`` percent of the conversations of the model ``name`` to ``candidate``."""
        query = [*(f"tenant={quote(one, safe='')}" for one in tenants), *(["auto=1"] if auto else [])]
        query += [] if least is None else [f"least={least}"]
        path = f"/v1/fleet/canary/{quote(name, safe='')}/start/{quote(candidate, safe='')}/{share:g}"
        return await self._post(path + (f"?{'&'.join(query)}" if query else ""))

    async def share_canary(self, name: str, share: float) -> dict[str, Any]:
        """Change the percent of the conversations that the candidate for ``name`` gets."""
        return await self._post(f"/v1/fleet/canary/{quote(name, safe='')}/share/{share:g}")

    async def promote_canary(self, name: str) -> dict[str, Any]:
        """Have the candidate answer for the model ``name``."""
        return await self._post(f"/v1/fleet/canary/{quote(name, safe='')}/promote")

    async def roll_back_canary(self, name: str) -> dict[str, Any]:
        """Have the model before the candidate answer for ``name`` again, also after a promotion."""
        return await self._post(f"/v1/fleet/canary/{quote(name, safe='')}/rollback")

    async def metrics(self) -> str:
        """Return the conductor's own /metrics."""
        return (await self._read("/metrics")).decode()

    async def timeline(self, request_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/requests/{quote(request_id, safe='')}/timeline")

    async def migrate(self, request_id: str, target: str = "") -> dict[str, Any]:
        """Move a running request to the decode node ``target``; empty: to the one that suits it best."""
        path = f"/v1/requests/{quote(request_id, safe='')}/migrate"
        query = f"?target={quote(target, safe='')}" if target else ""
        return await self._post(path + query)

    async def live(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the dashboard's snapshot once a second, until the conductor ends."""
        url = f"{self.url}/v1/live"
        try:
            async with self._session.get(url, headers=self._authorization("GET", url)) as response:
                await _raise_for_status(url, response)
                async for snapshot in _events(response):
                    yield snapshot
        except aiohttp.ClientError as error:
            raise ApiError(url, 0, _no_answer(error)) from error

    async def model(self) -> dict[str, Any]:
        """Return the served model."""
        models: list[dict[str, Any]] = (await self._get("/v1/models", "data"))["data"]
        return models[0]

    def chat(self, messages: Sequence[Message], reply: Reply, **parameters: Any) -> AsyncGenerator[str, None]:
        """Stream an answer's text and fill ``reply``. Closing the stream cancels the request.

        It goes on by itself where the connection breaks or the conductor ends (see ``RESUME_S``).
        """
        return self._stream("/v1/chat/completions", {"messages": list(messages), **parameters}, reply)

    def complete(
        self, prompt: str | Sequence[int], reply: Reply, **parameters: Any
    ) -> AsyncGenerator[str, None]:
        """Stream the continuation of ``prompt``, a text or token ids, for checkpoints without a chat
        template."""
        return self._stream("/v1/completions", {"prompt": prompt, **parameters}, reply)

    async def _stream(self, path: str, parameters: dict[str, Any], reply: Reply) -> AsyncGenerator[str, None]:
        options = {"include_usage": True, "resumable": True}
        body = {"stream": True, "stream_options": options, **parameters}
        began_s, turn = self._clock(), Turn(len(self._urls))
        while True:
            url, ended = f"{self._urls[turn.place]}{path}", False
            try:
                async for chunk in self._events_of(url, body, turn):
                    if chunk is None:
                        ended = True
                        continue
                    if "error" in chunk:
                        raise ApiError(url, 200, str(chunk["error"]["message"]))
                    reply.id = chunk["id"]
                    reply.usage = chunk.get("usage") or reply.usage
                    for choice in chunk["choices"]:
                        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
                        if text := choice["text"] if "text" in choice else choice["delta"].get("content"):
                            reply.pieces_s.append(self._clock() - began_s)
                            reply.text += text
                            yield text
                failure = ApiError(url, 0, "the stream ended before the answer was complete")
            except aiohttp.ClientError as error:
                failure = ApiError(url, 0, _no_answer(error))
            except ApiError as error:
                if error.status not in _TRY_AGAIN:
                    raise
                failure = error
            if ended or (reply.finish_reason and not turn.last_id):
                return
            if not turn.next(self._clock()):
                raise failure
            reply.num_resumed += bool(turn.last_id)
            await asyncio.sleep(turn.pause_s)

    async def _events_of(
        self, url: str, body: dict[str, Any], turn: Turn
    ) -> AsyncGenerator[dict[str, Any] | None, None]:
        """The data of a stream's events, None for its end. Keeps the latest id in ``turn``."""
        headers = self._authorization("POST", url) | ({LAST_EVENT_ID: turn.last_id} if turn.last_id else {})
        async with self._session.post(url, json=body, headers=headers) as response:
            await _raise_for_status(url, response)
            event_id = ""
            async for line in response.content:
                if line.startswith(b"id: "):
                    event_id = line[4:].decode().strip()
                elif line.startswith(b"data: "):
                    data = line[6:].strip()
                    # Sent in one write with its data: a half of the two is none.
                    turn.got(event_id)
                    yield None if data == b"[DONE]" else json.loads(data)

    async def _get(self, path: str, listed: str = "") -> dict[str, Any]:
        """``listed``: the answer has a list of this name."""
        return self._answer(path, await self._read(path), listed)

    async def _post(self, path: str, *, timeout_s: float = 10) -> dict[str, Any]:
        return self._answer(path, await self._read(path, "POST", timeout_s=timeout_s))

    def _answer(self, path: str, content: bytes, listed: str = "") -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or (listed and not isinstance(answer.get(listed), list)):
            raise ApiError(
                f"{self.url}{path}",
                0,
                "what answers there is no conductor: give its URL, as `moonpool up` prints it",
            )
        return answer

    async def _read(
        self, path: str, method: str = "GET", body: object = None, *, timeout_s: float = 10
    ) -> bytes:
        url = f"{self.url}{path}"
        try:
            timeout, headers = aiohttp.ClientTimeout(total=timeout_s), self._authorization(method, url)
            async with self._session.request(
                method, url, timeout=timeout, headers=headers, json=body
            ) as response:
                await _raise_for_status(url, response)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(url, 0, _no_answer(error)) from error


def _of_model(name: str) -> str:
    return f"?model={quote(name, safe='')}" if name else ""


def _base_of(url: str) -> str:
    """``url`` without the /v1 that OpenAI clients want at its end. Raises ``ConfigError``."""
    try:
        parsed = URL(url)
        is_ours = parsed.scheme in ("http", "https") and bool(parsed.host) and parsed.port is not None
    except ValueError:
        is_ours = False
    if not is_ours:
        raise ConfigError(f"a conductor's URL is http://HOST:PORT or https://HOST:PORT, got {url[:200]!r}")
    return url.rstrip("/").removesuffix("/v1")


def connector(url: str, ca: str = "") -> aiohttp.TCPConnector | None:
    """For sessions with the server at ``url``. None: no TLS. Raises ``ConfigError``: see ``https``."""
    return aiohttp.TCPConnector(ssl=client_context(ca)) if url.startswith("https:") else None


def _no_answer(error: BaseException) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = error.certificate_error
        if isinstance(why, ssl.SSLCertVerificationError) and why.verify_code in _NAMES_DIFFER:
            return (
                f"{why.verify_message}: issue one with the name in this URL (moonpool certs issue --address)"
            )
        return f"its certificate is not trusted ({why}): name its authority with --ca FILE"
    if isinstance(error, aiohttp.ClientConnectorSSLError):  # its number is none of the system's
        return f"the TLS handshake failed ({reason}): if it serves no HTTPS, its URL begins with http://"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno is not None:
        reason = os.strerror(error.errno).lower()
    return f"no answer ({reason}): is the cluster running there? `moonpool up` starts one"


async def _raise_for_status(url: str, response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    raise ApiError(url, response.status, message)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])
