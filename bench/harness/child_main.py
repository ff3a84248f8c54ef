"""The main program of a benchmark's child process: answers calls of an object's methods.

    python child_main.py TARGET:CLASS

TARGET is a module's name or the path of a file. The object is made from the keywords in the first line of the
input, JSON: other users see command lines. A peer's Python runs this file by its path: it imports only the
standard library, and puts no folder of ours on ``sys.path``.

The first line of the output is ``{"result": …}`` with the object's ``ready``, if it has one. Further lines of
input are ``{"call": METHOD, …keywords}``, answered by ``{"result": …}`` or ``{"error": TEXT}``. Methods, and
a method ``start``, may be async. The process ends with its input.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import runpy
import sys
import traceback
from typing import Any


async def _serve(make: Any, keywords: dict[str, Any], answers: Any) -> None:
    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        served = make(**keywords)
        if hasattr(served, "start"):
            await served.start()
        answer({"result": getattr(served, "ready", None)})
    except Exception as error:  # reported to the parent, which raises it
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        call = json.loads(line)
        try:
            result = getattr(served, call.pop("call"))(**call)
            answer({"result": await result if inspect.isawaitable(result) else result})
        except Exception as error:  # reported too
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    if hasattr(served, "close"):
        await served.close()


def main() -> None:
    target, _, name = sys.argv[1].rpartition(":")
    # What libraries print must not appear among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = runpy.run_path(target) if target.endswith(".py") else vars(importlib.import_module(target))
    keywords = json.loads(sys.stdin.readline())
    with asyncio.Runner(loop_factory=module.get("new_event_loop")) as runner:
        runner.run(_serve(module[name], keywords, answers))


if __name__ == "__main__":
    main()
