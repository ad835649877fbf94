"""What tells that a plan document was edited by hand."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

from pydantic import BaseModel

from meshwright.documents.json_text import finite

DocumentT = TypeVar("DocumentT", bound=BaseModel)
_LEFT_OUT: Any = {"digest": True, "solver": {"wall_s"}, "mapping": {"ranks"}}
"""What differs from run to run, what may lie in a file of its own, and the digest itself."""


def digest_of(plan: BaseModel) -> str:
    """SHA-256 of the content of a plan, or of a plan on a mixed cluster, in hexadecimal."""
    data = plan.model_dump(mode="json", by_alias=True, exclude=_LEFT_OUT)
    text = json.dumps(finite(data), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def with_digest(plan: DocumentT) -> DocumentT:
    """The plan with the digest of its content in its field `digest`."""
    return plan.model_copy(update={"digest": digest_of(plan)})
