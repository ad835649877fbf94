"""Installs packages like `pip install`, through uv where it can be had: the same versions in less time.

    python .ci/install.py ENVIRONMENT/bin/python ARGUMENT...

uv reads none of pip's settings, so they are handed to it. One that has no counterpart here, an index without
uv, or an error of uv's leaves the work to pip, whose message then counts.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

UV = "uv==0.13.9"
COUNTERPARTS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "no-cache-dir": ("UV_NO_CACHE", " "),
}
"""pip's setting, the variable that tells uv the same, and what stands there between several values."""
NO_MATTER = {
    *(
        "config-file",
        "disable-pip-version-check",
        "no-input",
        "progress-bar",
        "quiet",
        "verbose",
        "no-color",
    ),
    *(
        "cache-dir",
        "root-user-action",
        "retries",
        "prefer-binary",
        "no-warn-script-location",
        "no-python-version-warning",
    ),
}
"""pip's settings that change nothing in what is installed."""


def variables(listed: str) -> dict[str, str]:
    """What tells uv the settings that `pip config list` printed; a ValueError where one cannot be told."""
    settings: dict[str, str] = {}
    order = {"global": 0, "install": 1, ":env:": 2}
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    places = [(*name.rpartition(".")[::2], ast.literal_eval(value)) for name, _, value in lines]
    for _, name, value in sorted(
        (order[place], name, value) for place, name, value in places if place in order
    ):
        settings[name] = str(value)
    told: dict[str, str] = {}
    for name, value in settings.items():
        if name in COUNTERPARTS:
            variable, between = COUNTERPARTS[name]
            told[variable] = between.join(value.split())
        elif name not in NO_MATTER:
            raise ValueError(f"pip's setting {name} has no counterpart")
    return told


def install_with_uv(python: str, arguments: list[str]) -> None:
    """Installs them, or says in a ValueError why not."""
    pip = [sys.executable, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True)
    told = variables(listed.stdout)
    uv = Path(sys.executable).parent / "uv"
    if (
        not uv.exists()
        and subprocess.run(
            [*pip, "install", "--quiet", UV], capture_output=True, check=False
        ).returncode
    ):
        raise ValueError(f"pip cannot install {UV}")
    # The best version of all indexes, as pip takes it, not that of the first index which knows the name.
    environment = {**os.environ, **told, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    command = [str(uv), "pip", "install", "--quiet", "--python", python, *arguments]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise ValueError("see above")


def main() -> int:
    """The exit status of what installed them."""
    python, *arguments = sys.argv[1:]
    try:
        install_with_uv(python, arguments)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"without uv ({error}), pip installs {' '.join(arguments)}", file=sys.stderr)
        return subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *arguments], check=False
        ).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
