"""What all sections of a recipe have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _real_number(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(f"expected a number, got the text {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    return value


def several(value: object) -> object:
    return (value,) if isinstance(value, str | Path) else value


Real = Annotated[float, BeforeValidator(_real_number)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[Real, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
