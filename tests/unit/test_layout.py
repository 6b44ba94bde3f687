"""The folders keep their shape: what may be a package, what may import what, how long files and functions may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("relax_common", "relaxd", "dcs", "trainer_server", "rollout_server", "queue/relax_queue")


def sources() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    return [ROOT / name for name in tracked.split()]


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


def test_entry_points_are_short() -> None:
    for package in PACKAGES:
        path = ROOT / package / "__main__.py"
        if path.exists():
            assert path.read_text().count("\n") <= 60, path


def test_typed_packages_say_so() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()
