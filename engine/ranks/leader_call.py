"""A rank's call to its leader on another machine: commands and steps in, reports and ends of steps out."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

import grpc
import numpy as np

from moonpool.engine.collectives.board import SharedBoard, SharedMemory, StepWord
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import Config, TransferOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.description import own_version
from moonpool.runtime.message_checks import check_message
from moonpool.runtime.observing.log import setup_logging
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import NODE, Caller
from moonpool.runtime.service.lifecycle import parse_arguments

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 3.0
# For the last reports to reach the leader.
_END_S = 2.0
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# The leader will not take this process later either: ``RankUnfit``, and callers that it does not trust.
_FOR_GOOD = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class LeaderCall:
    """The call lasts until either side ends. The first rank of each machine creates a board and exchange
    memory like the leader's, where all ranks of its machine find them, and writes what the leader tells."""

    def __init__(self, config: Config, leader: str, environment: dict[str, str]) -> None:
        """``leader``: host:port, its ``engine.parallel.listen``. ``environment``: with the launcher's
        variables, which count the ranks of the other machines. Raises ConfigError."""
        host, _, port = leader.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(
                f"--leader must be HOST:PORT, where the node listens (engine.parallel.listen), got {leader!r}"
            )
        if not all(environment.get(name, "").isdigit() for name in _VARIABLES):
            raise ConfigError(
                f"{', '.join(_VARIABLES)} are not set: start the ranks of a machine with a launcher such as "
                f"torchrun --nproc-per-node=RANKS --no-python moonpool ranks --leader {leader}"
            )
        rank, world_size, local_world_size = (int(environment[name]) for name in _VARIABLES)
        self.leader = leader
        self._host, self._port = host.strip("[]"), int(port)
        self._join = node_pb2.RankJoin(
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            version=own_version(),
            name=config.node.id or socket.gethostname(),
            pid=os.getpid(),
        )
        self._transfer = config.transfer
        self._reports: SimpleQueue[node_pb2.RankReport | None] = SimpleQueue()
        self._commands: Iterator[node_pb2.RankCommand] = iter(())
        self._node_id = ""
        self._board: SharedBoard | None = None
        self._exchange: SharedMemory | None = None
        self._ended = threading.Event()
        self._last_message = ""

    def join(self) -> None:
        """Wait until the leader has taken this rank: without a time limit, because it may start later, and
        does again after a loss. Raises SystemExit when the launcher has ended, and ConfigError with the
        leader's reason when it refuses this rank for good."""
        launcher, pause_s = os.getppid(), _FIRST_PAUSE_S
        while not self._try_to_join():
            if os.getppid() != launcher:
                raise SystemExit("moonpool ranks: the launcher has ended, and no leader has taken this rank")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _try_to_join(self) -> bool:
        channel = rpc.threaded_channel(self.leader)
        reports: SimpleQueue[node_pb2.RankReport | None] = SimpleQueue()
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._join.leader_address = str(found[0][4][0])
            reports.put(node_pb2.RankReport(join=self._join))
            metadata = process.current().metadata("Ranks/Join")
            call = node_pb2_grpc.RanksStub(channel).Join(iter(reports.get, None), metadata=metadata)
            commands = iter(call)
            taken: node_pb2.RankCommand = next(commands)
        except (grpc.RpcError, OSError, StopIteration) as error:
            reports.put(None)
            channel.close()
            if isinstance(error, grpc.Call) and error.code() in _FOR_GOOD:
                raise ConfigError(f"the leader at {self.leader} refuses it: {_details(error)}") from None
            self._log_once(f"no leader at {self.leader} yet: {_details(error)}")
            return False
        self._commands, self._reports, self._node_id = commands, reports, taken.node_id
        self._log_once(f"rank {self._join.rank} of the other machines of node {taken.node_id}")
        return True

    def report(self, line: bytes) -> None:
        """Send a report, a line of JSON. From any thread."""
        self._reports.put(node_pb2.RankReport(line=line))

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield commands, each a line of JSON, until the leader ends the call. Steps are taken meanwhile."""
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def post(line: bytes | None) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        threading.Thread(target=self._receive, args=(post,), name="leader", daemon=True).start()
        while (line := await lines.get()) is not None:
            yield line

    def create_memory(
        self, world_size: int, payload_nbytes: int, exchange_nbytes: int, timeout_s: float
    ) -> dict[str, str]:
        """Create a board and exchange memory for the next model; return their paths. On the first rank of a
        machine."""
        for memory in (self._board, self._exchange):
            if memory is not None:
                memory.close()
        self._exchange = SharedMemory.create("exchange", exchange_nbytes)
        board = SharedBoard.create(world_size, payload_nbytes, timeout_s)
        board.beat()
        self._board = board
        return {"board": board.path, "exchange": self._exchange.path}

    def attach(self, board: SharedBoard) -> None:
        """Tell the leader what this rank posts on ``board``, its view of its machine's."""

        def done(step: int) -> None:
            words = [board.of_step(board.rank, step, word) for word in StepWord]
            self._reports.put(node_pb2.RankReport(done=node_pb2.RankDone(step=step, words=words)))

        board.on_done.append(done)
        board.on_beat.append(lambda: self._reports.put(node_pb2.RankReport()))

    def transfer_options(self, address: str) -> TransferOptions:
        """The options of this machine, with an address that others reach. ``address``: of this machine, as
        the leader sees it; used where none is set."""
        transfer = self._transfer
        if ipaddress.ip_address(address).is_loopback or transfer.tcp.host != TransferOptions().tcp.host:
            return transfer
        return replace(transfer, tcp=replace(transfer.tcp, host=address))

    def close(self) -> None:
        """End the call, after the leader has got the last reports."""
        self._reports.put(None)
        self._ended.wait(_END_S)

    def _receive(self, post: Callable[[bytes | None], None]) -> None:
        reason = "it closed the call"
        try:
            for command in self._commands:
                check_message(command)
                if command.WhichOneof("kind") == "line":
                    post(command.line)
                elif self._board is not None:
                    self._write(command, self._board)
        except grpc.RpcError as error:
            reason = _details(error)
        except Exception as error:
            log.exception("a command of the leader could not be processed")
            reason = f"{type(error).__name__}: {error}"
        log.info("node %s ended its group here: %s", self._node_id, reason)
        self._ended.set()
        post(None)

    @staticmethod
    def _write(command: node_pb2.RankCommand, board: SharedBoard) -> None:
        if not command.HasField("step"):
            board.beat()
            return
        step, nbytes = command.step.number, len(command.step.batch)
        board.payload(step)[:nbytes] = np.frombuffer(command.step.batch, np.uint8)
        board.publish(step, nbytes)

    def _log_once(self, message: str) -> None:
        if message != self._last_message:
            self._last_message = message
            log.info("%s", message)


def joined(argv: Sequence[str] | None = None) -> LeaderCall:
    """Join the leader that the command line names. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="moonpool ranks", allow_abbrev=False)
    parser.add_argument(
        "--leader",
        required=True,
        metavar="HOST:PORT",
        help="where the node listens for ranks of other machines: its engine.parallel.listen",
    )
    arguments = parse_arguments(parser, argv)
    config = load_config(arguments.config, arguments.set)
    call = LeaderCall(config, arguments.leader, dict(os.environ))
    name = config.node.id or socket.gethostname()
    process.use(process.Security(config.security, Caller(NODE, name)))
    setup_logging(config.log, f"rank {os.environ['RANK']} of {name}")
    call.join()
    return call


def _details(error: BaseException) -> str:
    details = error.details() if isinstance(error, grpc.Call) else ""
    return str(details or error or "it does not answer")
