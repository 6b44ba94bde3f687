"""Names for values parsed from JSON. No type can state their shape, so it is checked where they are read."""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonValue: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]
