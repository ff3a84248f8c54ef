"""What the processes of ``test_leaks.BriefPeer`` have in common, imported once and forked: libucp alone takes
0.4 s to load.
"""

from moonpool.transfer.native.ucx import load_ucx
from tests.transfer import test_leaks as test_leaks

load_ucx()
