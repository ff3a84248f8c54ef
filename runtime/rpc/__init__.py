"""gRPC servers and channels: limits, keepalive, request ids, ranges of numbers, and the mapping of errors."""

from moonpool.runtime.rpc.bounds import MAX_MESSAGE_NBYTES
from moonpool.runtime.rpc.client import channel, lose, node_errors, request_metadata
from moonpool.runtime.rpc.frames import DIRECT_PEER
from moonpool.runtime.rpc.server import MessageMalformed, Server, Servicer, end_stream, serve
from moonpool.runtime.rpc.threaded import admit, serve_threaded, threaded_channel

__all__ = [
    "DIRECT_PEER",
    "MAX_MESSAGE_NBYTES",
    "MessageMalformed",
    "Server",
    "Servicer",
    "admit",
    "channel",
    "end_stream",
    "lose",
    "node_errors",
    "request_metadata",
    "serve",
    "serve_threaded",
    "threaded_channel",
]
