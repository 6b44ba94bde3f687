"""The folders keep their shape: what may be a package, what may import what, how long files and functions may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("relax_common", "relaxd", "dcs", "trainer_server", "rollout_server", "queue/relax_queue")
ROOMS = {
    "relax_common": ("rows", "recipe", "errors", "rpc", "process", "storage"),
    "queue/relax_queue": ("rows", "rules", "storage", "transport", "client", "broker"),
    "dcs": ("rules", "codec", "transport", "checkpoints", "client"),
    "trainer_server": ("roles", "step", "algorithms", "maths", "megatron", "packing", "model", "publish"),
    "rollout_server": ("groups", "trajectory", "workflows", "rewards", "engines"),
    "relaxd": ("run", "plan", "launch", "data", "ctl"),
}


def sources() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    return [ROOT / name for name in tracked.split()]


def product_files() -> list[Path]:
    return [path for path in sources() if any(path.is_relative_to(ROOT / package) for package in PACKAGES)]


@pytest.mark.parametrize("folder", ["queue", "proto", "proto/relax"])
def test_source_roots_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_package_below_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_queue_of_the_standard_library_is_not_shadowed() -> None:
    code = "import queue, concurrent.futures, logging.handlers; queue.SimpleQueue()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("module", ["relaxd.daemon", "relaxd.ctl.main", "relax_queue.broker.daemon", "dcs.daemon"])
def test_control_plane_and_bus_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for path in sources():
        lines = path.read_text().count("\n")
        if lines > 600:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 100:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert not too_long


def test_few_files_are_small() -> None:
    """A file is a noun that a reader would look for. Package markers and entry points do not count."""
    texts = {path: path.read_text() for path in product_files() if path.name != "__init__.py"}
    small = [path for path, text in texts.items() if text.count("\n") < 40 and "__main__" not in text + path.name]
    assert len(small) <= 30, "\n".join(str(path.relative_to(ROOT)) for path in small)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_a_crowd(package: str) -> None:
    folders = [ROOT / package, *(each for each in (ROOT / package).rglob("*") if each.is_dir())]
    assert not [folder for folder in folders if len(list(folder.glob("*.py"))) > 20]


def test_the_rooms_are_there() -> None:
    assert not [room for package, rooms in ROOMS.items() for room in rooms if not (ROOT / package / room).is_dir()]


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    """A room is a folder of a package, with what is below it, or a file beside the rooms."""
    names = tuple(package.rpartition("/")[2] for package in PACKAGES)
    graph = grimp.build_graph(*names)
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            if _room(module) != _room(other):
                imports.setdefault(_room(module), set()).add(_room(other))
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        pytest.fail(f"these rooms import each other: {' -> '.join(error.args[1])}")


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_entry_points_are_short() -> None:
    for package in PACKAGES:
        path = ROOT / package / "__main__.py"
        if path.exists():
            assert path.read_text().count("\n") <= 60, path


def test_typed_packages_say_so() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()
