"""Property tests repeat: the same examples on every machine, and no deadline that a busy one could miss."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.soaked import examples

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=examples(100))
settings.load_profile("repeatable")
# Examples would take constants from whichever modules are imported: others for one file than for all.
providers._get_local_constants = lambda: providers._local_constants
