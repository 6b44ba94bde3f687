"""Generates the gRPC stubs of `proto/relax` at install time (hatch build hook), or by `python proto/build_stubs.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

PROTO_ROOT = Path(__file__).resolve().parent


def generate(root: Path = PROTO_ROOT) -> list[Path]:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` beside each .proto; returns what was written."""
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(root)) for path in root.glob("relax/*/v1/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    args = ["protoc", f"-I{root}", f"-I{well_known}", f"--python_out={root}", f"--pyi_out={root}"]
    if protoc.main([*args, f"--grpc_python_out={root}", *sources]) != 0:
        raise RuntimeError(f"protoc failed for {', '.join(sources)}")
    return sorted(path for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py") for path in root.rglob(pattern))


def _hook() -> type[Any]:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class StubsBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            build_data["artifacts"].extend(f"/proto/{path.relative_to(PROTO_ROOT)}" for path in generate())

    return StubsBuildHook


if __name__ == "__main__":
    print(f"{len(generate())} stub files below {PROTO_ROOT.name}/", file=sys.stderr)
else:
    StubsBuildHook = _hook()
