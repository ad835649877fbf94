"""Threads of this package, told apart from those of a program that uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_NAME = "meshwright"


def start_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Starts a thread that nobody waits for."""
    threading.Thread(target=work, args=arguments, name=_NAME, daemon=True).start()


def others_run() -> bool:
    """Whether there are threads beside this one that the package has not started."""
    this = threading.current_thread()
    return any(thread is not this and thread.name != _NAME for thread in threading.enumerate())
