"""One small change at a time in the source of a module: what a slip of the hand would leave."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_ASSERTED = "strict"
"""The keyword of zip that asserts; assertions are not changed."""
_NOT_RUN = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """One change of a module; `before` and `after` are the changed expression or statement."""

    place: int
    variant: int
    function: str
    """Where it is: `function`, `Class.method`, or nothing at the level of the module."""
    line: int
    before: str
    after: str

    def tree(self, source: str) -> ast.Module:
        """The module with this change."""
        tree = ast.parse(source)
        place = list(_places(tree))[self.place]
        place.put(ast.copy_location(_variants(place)[self.variant], place.node))
        return ast.fix_missing_locations(tree)


@dataclass(frozen=True)
class _Place:
    """A node and where it hangs, so that another can take its place."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    function: str

    def put(self, other: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, other)
        else:
            getattr(self.parent, self.field)[self.index] = other

    @property
    def shown(self) -> ast.AST:
        """The node, or what a number alone is part of."""
        return self.parent if isinstance(self.node, ast.Constant) else self.node

    def told_with(self, other: ast.AST) -> str:
        if self.shown is self.node:
            return ast.unparse(other)
        self.put(other)
        told = ast.unparse(self.shown)
        self.put(self.node)
        return told

    @property
    def is_condition(self) -> bool:
        return self.field in ("test", "ifs") or isinstance(self.parent, ast.BoolOp)


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a module, in a fixed order."""
    for at, place in enumerate(_places(ast.parse(source))):
        for number, variant in enumerate(_variants(place)):
            line = getattr(place.node, "lineno", 0)
            yield Mutant(at, number, place.function, line, ast.unparse(place.shown), place.told_with(variant))


def _places(parent: ast.AST, function: str = "") -> Iterator[_Place]:
    """All nodes but those in messages for people, assertions, annotations and decorators."""
    for field, value in ast.iter_fields(parent):
        if field in _NOT_RUN:
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _only_tells(node):
                continue
            yield _Place(parent, field, index, node, function)
            name = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ""
            yield from _places(node, ".".join(filter(None, (function, name))))


def _only_tells(node: ast.AST) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.Assert)) or (isinstance(node, ast.keyword) and node.arg == _ASSERTED)


def _variants(place: _Place) -> list[ast.AST]:
    """What may stand in a node's place."""
    node = place.node
    if isinstance(node, ast.stmt):
        return _statements(node)
    if place.is_condition and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return [ast.UnaryOp(ast.Not(), node), *_expressions(place)]
    return _expressions(place)


def _statements(node: ast.stmt) -> list[ast.AST]:
    """Without a statement that changes, refuses or ends something; without what a function returns."""
    match node:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete() | ast.Raise():
            return [ast.Pass()]
        case ast.Continue() | ast.Break() | ast.Return(value=None) | ast.Expr(value=ast.Call()):
            return [ast.Pass()]
        case ast.Return(value=value) if not isinstance(value, ast.Constant):
            return [ast.Return(ast.Constant(None))]
        case _:
            return []


def _expressions(place: _Place) -> list[ast.AST]:
    node = place.node
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            return [ast.Compare(node.left, [_COMPARED[type(op)]()], node.comparators)]
        case ast.BoolOp(op=op):
            return [ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPUTED and not _is_text(node):
            turned = [ast.BinOp(right, op, left)] if isinstance(op, ast.Sub) else []
            return [ast.BinOp(left, _COMPUTED[type(op)](), right), *turned]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return [operand]
        case ast.Call():
            return _calls(node)
        case ast.Constant(value=bool()):
            return [ast.Constant(not node.value)]
        case ast.Constant(value=int()):
            return [ast.Constant(node.value + 1)]
        case ast.Set() | ast.Tuple(ctx=ast.Load()) if not isinstance(place.parent, (ast.Subscript, ast.Assign)):
            return _shorter(node)
        case ast.Dict(keys=keys, values=values):
            without = [(keys[:at] + keys[at + 1 :], values[:at] + values[at + 1 :]) for at in range(len(keys))]
            return [ast.Dict(*rest) for rest in without]
        case _:
            return []


def _calls(node: ast.Call) -> list[ast.AST]:
    """Another function, or one keyword less."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    other = _CALLED.get(name, "") if name != "sorted" or not node.keywords else ""
    renamed = [ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords)] if other else []
    fewer = [
        ast.Call(node.func, node.args, node.keywords[:at] + node.keywords[at + 1 :])
        for at, keyword in enumerate(node.keywords)
        if keyword.arg not in (None, _ASSERTED)
    ]
    return [*renamed, *fewer]


def _shorter(node: ast.Set | ast.Tuple) -> list[ast.AST]:
    """One word of several less."""
    if len(node.elts) < 2 or not all(isinstance(word, (ast.Constant, ast.Attribute)) for word in node.elts):
        return []
    return [
        ast.Set(rest) if isinstance(node, ast.Set) else ast.Tuple(rest, ast.Load())
        for rest in (node.elts[:at] + node.elts[at + 1 :] for at in range(len(node.elts)))
    ]


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, (ast.JoinedStr, ast.Constant)) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
