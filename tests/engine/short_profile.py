"""Imported by the tests and their fork server: an engine times each shape once, not the best of four.

That is most of what the start of a small model takes, and tests start hundreds of engines. The shapes stay,
so every coefficient is determined. ``test_profile.py`` tests the profile as it is.
"""

from __future__ import annotations

from moonpool.engine.execution import cost_profile

REPETITIONS = cost_profile._REPETITIONS
cost_profile._REPETITIONS = 1
