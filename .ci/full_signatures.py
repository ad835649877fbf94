"""An extension of griffe for the site: a function with `**options` shows each of them, with its default."""

from __future__ import annotations

from inspect import signature
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind

from meshwright import api


class FullSignatures(Extension):
    """Signatures as `inspect.signature` has them, where a TypedDict stands for several parameters."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Take the dictionary's place by what it holds."""
        if "options" not in func.parameters or "Unpack[" not in str(
            func.parameters["options"].annotation
        ):
            return
        del func.parameters["options"]
        for each in signature(getattr(api, func.name)).parameters.values():
            if each.name not in func.parameters:
                kind, default = ParameterKind.keyword_only, repr(each.default)
                func.parameters.add(
                    Parameter(each.name, annotation=each.annotation, kind=kind, default=default)
                )
