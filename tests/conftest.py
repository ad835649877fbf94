"""Property tests repeat: the same examples on every machine, and no deadline that a busy one could miss."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
