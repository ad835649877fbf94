"""Ranges of the numbers that specifications of models hold."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=10_000_000, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
