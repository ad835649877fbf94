"""What `.ci/install.py` tells uv of pip's settings, and where it leaves the work to pip."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "install.py"


@pytest.fixture(scope="module")
def variables() -> Callable[[str], dict[str, str]]:
    found: Callable[[str], dict[str, str]] = runpy.run_path(str(SCRIPT))["variables"]
    return found


def test_the_settings_of_pip_reach_uv(variables: Callable[[str], dict[str, str]]) -> None:
    listed = r"""
:env:.cert='/etc/own.crt'
:env:.config-file='own/pip.conf'
:env:.disable-pip-version-check='1'
download.no-binary=':all:'
global.cert='/etc/all.crt'
global.extra-index-url='\nfile:///one/simple\nfile:///two/simple'
global.find-links='/wheels /more'
global.index-url='https://user:pass=word@index.example/simple'
install.constraint='/etc/caps.txt'
"""
    assert variables(listed) == {
        "SSL_CERT_FILE": "/etc/own.crt",
        "UV_INDEX": "file:///one/simple file:///two/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "https://user:pass=word@index.example/simple",
        "UV_CONSTRAINT": "/etc/caps.txt",
    }
    assert variables("") == {}


def test_a_setting_that_uv_cannot_be_told_leaves_the_work_to_pip(
    variables: Callable[[str], dict[str, str]],
) -> None:
    with pytest.raises(ValueError, match="only-binary"):
        variables("install.only-binary=':all:'")
