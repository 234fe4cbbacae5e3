"""Functions that stand alone, from parsed sources: what PyX is seeded with."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trainwright.core.errors import DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.filters import Decontaminate
from trainwright.data.build.pipeline import chain
from trainwright.data.build.stage import Stage

# Builtins that reach outside or depend on where and when they run.
_UNWANTED = {
    "open", "exec", "eval", "compile", "input", "print", "__import__", "globals", "locals", "vars", "id", "breakpoint",
    "exit", "quit", "help", "memoryview", "super", "object", "hash", "dir", "setattr", "delattr", "getattr", "type",
}  # fmt: skip
_PLAIN = set(dir(builtins)) - _UNWANTED


@dataclass(frozen=True)
class Function:
    """A function that needs nothing but builtins. calls: literal calls that are known to be meant."""

    name: str
    code: str
    parameters: int
    origin: str = ""
    licence: str = ""
    calls: tuple[str, ...] = field(default=())


class _Strip(ast.NodeTransformer):
    """Docstrings and annotations away: they name what is not there, and say what the code should say."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        node.type_comment = None
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def functions_of(source: str, origin: str = "", licence: str = "", max_lines: int = 25) -> Iterator[Function]:
    """The module's top-level functions that stand alone: plain arguments, a returned value, no names but builtins.

    Raises DataError for a source that does not parse.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{origin or 'the source'} does not parse: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _fits(node):
            node = ast.fix_missing_locations(_Strip().visit(node))
            code = ast.unparse(node)
            if 2 <= len(code.splitlines()) <= max_lines and _alone(code):
                yield Function(node.name, code, len(node.args.args), f"{origin}:{node.lineno}", licence)


def _fits(node: ast.FunctionDef) -> bool:
    a = node.args
    if node.decorator_list or a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or not 1 <= len(a.args) <= 4:
        return False
    if node.name.startswith("__"):
        return False
    inner = list(ast.walk(node))
    unwanted = (ast.Yield, ast.YieldFrom, ast.Await, ast.Import, ast.ImportFrom, ast.Global, ast.ClassDef, ast.With)
    if any(isinstance(n, unwanted) or (isinstance(n, ast.FunctionDef | ast.Lambda) and n is not node) for n in inner):
        return False
    return any(isinstance(n, ast.Return) and n.value is not None for n in inner)


def _alone(code: str) -> bool:
    """Whether every name that is not local is a builtin, or the function's own."""
    try:
        table = symtable.symtable(code, "<seed>", "exec")
    except (SyntaxError, ValueError):
        return False
    own = {s.get_name() for s in table.get_symbols() if s.is_assigned()}
    todo = list(table.get_children())
    while todo:
        scope = todo.pop()
        todo += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_global() and symbol.get_name() not in _PLAIN | own:
                return False
    return True


def from_stdlib(limit: int | None = None) -> Iterator[Function]:
    """Functions of the running Python's own library, in the order of its files."""
    from trainwright.data.sources.python_stdlib import PythonStdlibSource

    found = 0
    for document in PythonStdlibSource().documents("train", 0.0):
        try:
            for function in functions_of(document.text, document.id, "PSF-2.0"):
                yield function
                found += 1
                if limit is not None and found >= limit:
                    return
        except DataError:
            continue  # templates of code among the library's files


def cleaned(
    functions: Iterable[Function], held_out: Iterable[str] = (), stages: Iterable[Stage] = ()
) -> list[Function]:
    """Without copies, and without what is in ``held_out`` (programs that a model is to be judged on).

    Both are compared as syntax trees without docstrings and annotations, and without the function's name. stages:
    further ones of data/build, such as NearDedup().
    """
    from trainwright.data.build.dedup import ExactDedup

    by_id: dict[str, Function] = {}
    documents = []
    for i, function in enumerate(functions):
        by_id[str(i)] = function
        documents.append(Document(_normal(function.code), str(i), source="pyx"))
    held = [form for text in held_out for form in _forms(text)]
    through = chain([Decontaminate(held), ExactDedup(keep="first", max_source_loss=1.0), *stages], documents)
    return [by_id[d.id] for d in through]


def _forms(text: str) -> list[str]:
    """A held-out program in the form that functions are compared in, each of its functions too."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return [text]
    return [_normal(ast.unparse(n)) for n in tree.body if isinstance(n, ast.FunctionDef)] or [text]


def _normal(code: str) -> str:
    tree = _Strip().visit(ast.parse(code))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            old, node.name = node.name, "f"
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id == old:
                    inner.id = "f"
    return ast.unparse(ast.fix_missing_locations(tree))
