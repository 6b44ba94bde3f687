"""Entry of the engine's process; run by path, as `PYTHON -P .../child/main.py '{"model_path": ...}'`.

The interpreter may be another than the daemon's. Two of our packages are made importable by name, and nothing else of
the daemon's installation: its other libraries must not shadow the engine's own. Processes that SGLang spawns run this
file again up to the guard, so they find the same packages and stand-ins.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

INSTALLED = Path(__file__).resolve().parents[4]


def expose(package: str) -> None:
    folder = INSTALLED / package
    spec = importlib.util.spec_from_file_location(
        package, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


for name in ("relax_common", "rollout_server"):
    if name not in sys.modules:
        expose(name)
if __name__ == "__main__":
    # Before SGLang is imported, which takes tens of seconds: if the starter is killed during that time, this process
    # ends too.
    importlib.import_module("relax_common.process.tuning").end_with_parent(json.loads(sys.argv[1])["parent_pid"])
importlib.import_module("rollout_server.engines.sglang.cpu.standins").install()

if __name__ == "__main__":
    importlib.import_module("rollout_server.engines.sglang.child.serve").main(sys.argv[1])
