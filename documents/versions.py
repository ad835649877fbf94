"""Which version of the program writes a document."""

from __future__ import annotations

from importlib import metadata


def program_version() -> str:
    """Such as `meshwright 0.1.0`; without a number where it runs from a folder that is not installed."""
    try:
        return f"meshwright {metadata.version('meshwright')}"
    except metadata.PackageNotFoundError:
        return "meshwright"
