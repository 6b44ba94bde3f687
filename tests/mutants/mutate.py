"""One small change at a time in the source of a module: what a slip of the hand would leave."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change of a module; `before` and `after` are the changed expression or statement."""

    number: int
    line: int
    before: str
    after: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a module, in a fixed order."""
    tree = ast.parse(source)
    number = 0
    for at, node in enumerate(_places(tree)):
        for change in range(len(_changes(node))):
            changed = copy.deepcopy(tree)
            twin = _places(changed)[at]
            before = ast.unparse(twin)
            _changes(twin)[change]()
            yield Mutant(
                number, getattr(node, "lineno", 0), before, ast.unparse(twin), ast.fix_missing_locations(changed)
            )
            number += 1


def _places(tree: ast.AST) -> list[ast.AST]:
    """All nodes but those within messages for people, assertions and decorators."""
    found: list[ast.AST] = []
    decorators = getattr(tree, "decorator_list", [])
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.JoinedStr, ast.Assert)) and child not in decorators:
            found += [child, *_places(child)]
    return found


def _changes(node: ast.AST) -> list[Callable[[], None]]:
    """Ways to change a node in place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        return [lambda: setattr(node, "ops", [_COMPARED[type(node.ops[0])]()])]
    if isinstance(node, ast.BoolOp):
        return [lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())]
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED and not _is_text(node):
        return [lambda: setattr(node, "op", _COMPUTED[type(node.op)]())]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        return [lambda: setattr(node.func, "id", _CALLED[node.func.id])]
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        return [lambda: setattr(node.value, "value", not node.value.value)]
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        return [lambda: setattr(node.value, "value", not node.value.value)]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return [lambda: setattr(node, "value", ast.Constant(None))]
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
        return [lambda: setattr(node.value, "value", node.value.value + 1)]
    return []


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, (ast.JoinedStr, ast.Constant)) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
