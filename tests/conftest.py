"""What every test shares."""

from __future__ import annotations

from hypothesis import settings

# Cores are shared and kernels compile on first use: a slow example is no failure. The test's own limit holds.
settings.register_profile("moonpool", deadline=None)
settings.load_profile("moonpool")
