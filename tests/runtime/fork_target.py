"""Run by the fork server in tests: does what its arguments say."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time


def facts() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "argv": sys.argv[1:],
        "directory": os.getcwd(),
        "colour": os.environ.get("COLOUR"),
        "preloaded": "xml.dom.minidom" in sys.modules,
        "frozen": gc.get_freeze_count(),
        "name": __name__,
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "title": " ".join(part for part in open("/proc/self/cmdline").read().split("\0") if part),
    }


async def start_another() -> None:
    from moonpool.runtime.service.spawn import spawn

    command = [sys.executable, "-m", "tests.runtime.fork_target", "facts", "sleep"]
    process = await spawn(command, environment=os.environ)
    assert process.stdout is not None
    print((await process.stdout.readline()).decode(), end="", flush=True)
    await process.wait()


def main() -> int:
    for word in sys.argv[1:]:
        if word == "facts":
            print(json.dumps(facts()), flush=True)
        elif word == "echo":
            print(sys.stdin.read().upper(), flush=True)
        elif word == "complain":
            print("something is wrong", file=sys.stderr)
        elif word == "fail":
            raise ValueError("as asked")
        elif word == "sleep":
            time.sleep(600)
        elif word == "another":
            asyncio.run(start_another())
        elif word == "slow-end":
            import atexit

            atexit.register(lambda: print("at exit", flush=True))
        else:
            return int(word)
    return 0


if __name__ == "__main__":
    sys.exit(main())
