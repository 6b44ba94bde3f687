"""Runs pytest with one module replaced by one of its mutants: `child.py MODULE NUMBER PYTEST-ARGUMENTS...`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from mutate import mutants


class Loader(importlib.abc.InspectLoader):
    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._number = number

    def get_source(self, fullname: str) -> str:
        return Path(self._path).read_text()

    def exec_module(self, module: ModuleType) -> None:
        mutant = next(itertools.islice(mutants(self.get_source(module.__name__)), self._number, None))
        exec(compile(mutant.tree, self._path, "exec"), module.__dict__)


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, number: int) -> None:
        self._module = module
        self._number = number

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            raise ImportError(f"{fullname} has no source")
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=Loader(found.origin, self._number))


if __name__ == "__main__":
    module, number, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, Finder(module, int(number)))
    sys.exit(pytest.main(arguments))
