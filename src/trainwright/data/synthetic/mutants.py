"""Small faults put into a program, one at a time: the share that a suite notices is its mutation score.

mutmut and cosmic-ray change the files of a project and run its test command; here a program is a string that runs in
the sandbox, so the handful of classic operators (Offutt et al. 1996) is written on Python's own syntax tree.
A mutant that means the same as the program cannot be noticed, so a perfect suite may stay below 1.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes to stand in the place of ``node``."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _COMPARISONS.get(type(op), ()):
                changed = copy.deepcopy(node)
                changed.ops[i] = other()
                yield changed
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        changed_op = copy.deepcopy(node)
        changed_op.op = _ARITHMETIC[type(node.op)]()
        yield changed_op
    elif isinstance(node, ast.BoolOp):
        swapped = copy.deepcopy(node)
        swapped.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield swapped
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int | float):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
        elif isinstance(node.value, str):
            yield ast.Constant("" if node.value else "x")
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        negated = copy.deepcopy(node)
        negated.test = ast.UnaryOp(ast.Not(), negated.test)
        yield negated
    elif isinstance(node, ast.Break | ast.Continue):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


class _Replace(ast.NodeTransformer):
    def __init__(self, number: int, by: ast.AST):
        self.number, self.by, self._at = number, by, -1

    def visit(self, node: ast.AST) -> ast.AST:
        self._at += 1
        if self._at == self.number:
            return ast.copy_location(self.by, node)
        return self.generic_visit(node)


class _InOrder(ast.NodeVisitor):
    def __init__(self) -> None:
        self.nodes: list[ast.AST] = []

    def visit(self, node: ast.AST) -> None:
        self.nodes.append(node)
        self.generic_visit(node)


def mutants(code: str, most: int | None = None, seed: int = 0) -> list[str]:
    """Programs that differ from ``code`` by one fault each, without repetitions; ``most`` of them by a hash.

    Raises DataError for a program that does not parse.
    """
    if most is not None and most < 1:
        raise ConfigError("should be at least 1", key="mutants", value=most)
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the program does not parse: {error}") from None
    docstrings = {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and n.body
        and isinstance(n.body[0], ast.Expr)
    }
    order = _InOrder()
    order.visit(tree)
    found: dict[str, None] = {}
    for number, node in enumerate(order.nodes):
        if id(node) in docstrings:
            continue
        for by in _changes(node):
            changed = ast.fix_missing_locations(_Replace(number, by).visit(copy.deepcopy(tree)))
            text = ast.unparse(changed)
            try:
                compile(text, "<mutant>", "exec")
            except (SyntaxError, ValueError):
                continue  # a break that was the last of its loop's else, ...
            found.setdefault(text)
    found.pop(ast.unparse(tree), None)
    everything = list(found)
    if most is None or len(everything) <= most:
        return everything
    chosen = set(sorted(everything, key=lambda m: derive(seed, "mutant", m))[:most])
    return [m for m in everything if m in chosen]
