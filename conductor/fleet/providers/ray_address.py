"""Whether anything answers at the address of a Ray cluster: Ray itself would try for half a minute."""

from __future__ import annotations

import os

import grpc.aio

from moonpool.conductor.fleet.errors import ProviderFailed

ANSWER_S = 4.0
_AUTO = "auto"
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def check_answers(address: str, answer_s: float = ANSWER_S) -> None:
    """``address``: as in ``fleet.ray``. One that Ray finds by itself, or reaches by TLS, is not tried.

    Raises ``ProviderFailed``: no gRPC server answered there within ``answer_s``.
    """
    if address == _AUTO:
        address = os.environ.get("RAY_ADDRESS") or _AUTO
    if address == _AUTO or os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true"):
        return
    options = (("grpc.enable_http_proxy", 0),)  # as Ray's own
    async with grpc.aio.insecure_channel(address.removeprefix("ray://"), options) as channel:
        try:
            # Any server of gRPC knows the method, or says that it does not.
            await channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)(b"", timeout=answer_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in _SILENT:
                why = error.details() if error.code() is grpc.StatusCode.UNAVAILABLE else ""
                raise ProviderFailed(
                    f"no Ray cluster answers at {address}: {why or f'no answer within {answer_s:g} s'}. Give "
                    "the address of its client server, as ray://HOST:10001, or ray://auto on one of its "
                    "machines"
                ) from error
