"""The life cycle of a service: options, logs, ready line, signals, exit code."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import REGISTRY, disable_created_metrics

from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing.audit import audited
from moonpool.runtime.observing.log import setup_logging
from moonpool.runtime.observing.tracing import setup_tracing
from moonpool.runtime.redaction import hide_arguments, hide_in_tracebacks
from moonpool.runtime.security import process
from moonpool.runtime.security.posture import SecurityCollector, check_listening, warnings
from moonpool.runtime.security.roles import CONDUCTOR, NODE, Caller
from moonpool.runtime.service.child import BEAT_S, REPORTS_LOADING
from moonpool.runtime.service.heartbeat import Heartbeat
from moonpool.runtime.service.vital import VITAL

log = logging.getLogger(__name__)

# The event loop must get the interpreter back quickly from the thread that runs tensor work between two calls
# that release the lock; the default is ten times this.
SWITCH_INTERVAL_S = 0.0005


class ServiceBroken(MoonpoolError):
    """A background task of the service failed. The service has closed what it had started."""

    failure = FailureClass.WORKER

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(
            f"{what}: {type(error).__name__}: {error}; the service has ended, its traceback is above"
        )


class ServiceContext:
    """The second argument of a service's main function. ``arguments``: of its command line. ``on_ready`` is
    called before the parent is told that the service is ready."""

    def __init__(
        self,
        role: str,
        arguments: argparse.Namespace | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.role = role
        self._on_ready = on_ready
        self.arguments = arguments or argparse.Namespace()
        self._lock = threading.Lock()
        self.draining = asyncio.Event()  # set by the first SIGTERM or SIGINT

    def ready(self, **facts: object) -> None:
        """Tell the parent that the service is ready: one JSON line on stdout with its addresses."""
        self._on_ready()
        self._tell({"ready": True, "role": self.role, "pid": os.getpid(), **facts})

    def drains(self) -> None:
        """Tell the parent that another process requested a drain."""
        self._tell({"draining": True})

    def loaded(self, nbytes_done: int, nbytes_total: int) -> None:
        """Tell the parent the progress of loading, from any thread, if it requested that."""
        if os.environ.get(REPORTS_LOADING):
            self._tell({"loaded": [nbytes_done, nbytes_total]})

    def beat(self) -> None:
        """Send a heartbeat to the parent, from any thread."""
        self._tell({"beat": 1})

    def _tell(self, message: dict[str, object]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


def freeze_garbage() -> None:
    """Collect the garbage of the start, and search what is left no more. Modules and a model's objects take
    the collector tens of milliseconds, in the middle of a step. Before another start: ``gc.unfreeze``."""
    gc.collect()
    gc.freeze()


ServiceMain = Callable[[Config, ServiceContext], Awaitable[None]]


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a process's command line, with ``--config`` and ``--set``, and hide the secrets in it."""
    hide_arguments()
    hide_in_tracebacks()
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of options; -: stdin")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set one option")
    return parser.parse_args(argv)


def run_service(
    main: ServiceMain,
    argv: Sequence[str] | None = None,
    *,
    role: str,
    parser: argparse.ArgumentParser | None = None,
) -> int:
    """Run ``main`` to its end and return the exit code: 0 done, 1 failed, 2 wrong configuration.

    ``main`` is cancelled when a task that ``vital`` started fails. The first SIGTERM or SIGINT sets
    ``context.draining``, the second cancels ``main``, the third ends the process. SIGUSR1 prints every
    thread's stack on stderr. ``parser``: of arguments of this role alone.
    """
    parser = parser or argparse.ArgumentParser(prog=f"moonpool {role}", allow_abbrev=False)
    arguments = parse_arguments(parser, argv)
    try:
        config = load_config(arguments.config, arguments.set)
        name = config.node.id or f"{role}@{socket.gethostname()}-{os.getpid()}"
        me = Caller(CONDUCTOR if role == "conductor" else NODE, name)
        security = process.Security(config.security, me)
        process.use(security)
        # Most sockets are opened after minutes of loading.
        check_listening(security, config.node.host, "node.host")
    except ConfigError as error:
        print(f"moonpool {role}: {error}", file=sys.stderr)
        return 2
    # A creation time for each counter would nearly double a scrape, without use.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    setup_logging(config.log, config.node.id or role)
    REGISTRY.register(SecurityCollector(security))
    for sentence in warnings(security):
        log.warning("%s", sentence)
    end_tracing = setup_tracing(config.tracing, config.node.id or role)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    context = ServiceContext(role, arguments, freeze_garbage)
    beat_s = os.environ.get(BEAT_S)
    heartbeat = Heartbeat(context.beat, float(beat_s)) if beat_s else None
    try:
        with audited(config.audit, config.node.id or role):
            uvloop.run(_supervise(main, config, context))
    except MoonpoolError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1
    except asyncio.CancelledError:
        log.warning("stopped before it was drained")
        return 1
    finally:
        end_tracing()
        if heartbeat is not None:
            heartbeat.stop()  # a thread that writes while the interpreter ends would abort it
    return 0


async def _supervise(main: ServiceMain, config: Config, context: ServiceContext) -> None:
    """Run ``main`` to its end. Raises its error, or ServiceBroken when one of its vital tasks has failed."""
    task = asyncio.ensure_future(main(config, context))
    signals_seen = 0
    broken: list[ServiceBroken] = []

    def on_error(loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
        loop.default_exception_handler(facts)  # logs the traceback
        if facts.get(VITAL) and not broken:
            broken.append(ServiceBroken(facts["message"], facts["exception"]))
            task.cancel()

    def on_signal(name: str) -> None:
        nonlocal signals_seen
        signals_seen += 1
        log.info("%s: %s", name, ("draining", "stopping", "ending")[min(signals_seen, 3) - 1])
        if signals_seen == 1:
            context.draining.set()
        elif signals_seen == 2:
            task.cancel()
        else:
            os._exit(1)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    loop.set_exception_handler(on_error)
    await asyncio.wait((task,))
    if broken:
        raise broken[0]
    task.result()
