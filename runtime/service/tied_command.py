"""Commands that the kernel kills when their parent ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs in the child before the real program: a preexec_fn may deadlock in a process that has threads.
# PR_SET_PDEATHSIG (1) survives the exec. If the parent died before the call, no signal would follow: stop.
_TIE = """
import ctypes, os, sys
if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG): " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied_command(command: Sequence[str]) -> list[str]:
    """``command``, wrapped so that the kernel kills it when the thread of this process that starts it ends.

    Start it from a thread that lives as long as the child should: normally the main one. On systems other
    than Linux the child is an ordinary one.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]
