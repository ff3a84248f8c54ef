"""Run a module within a network namespace: ``python -m tests.objects.in_namespace PATH MODULE WORDS…``.

As ``nsenter`` would, but in this process: it may have been forked, with what the module needs imported.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

_CLONE_NEWNET = 0x40000000


def main(path: str, module: str, *words: str) -> None:
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        sys.exit(f"{path}: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
