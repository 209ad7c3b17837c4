"""Small wrong changes to a Python module: every place where one can be made, and the text with one of them made."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_EXTREMES = {"min": "max", "amin": "amax", "minimum": "maximum", "clamp_min": "clamp_max", "floor": "ceil"}
_OPPOSITE = {**_EXTREMES, **{there: here for here, there in _EXTREMES.items()}}
# What is said to people is no computation, and compiled functions run outside the interpreter, which maps no lines.
_SPEECH = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_COMPILED = ("njit", "jit")


@dataclass(frozen=True, slots=True)
class Change:
    """One place in a file and what stands there instead; offsets are in bytes, as those of `ast`."""

    file: str
    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    old: str
    new: str
    text: str
    at_import: bool

    @property
    def name(self) -> str:
        """The change in one line, by the text of its own, since edits elsewhere move it in the file."""
        return f"{self.file}: {self.text} [{self.column}]: {_short(self.old)} -> {_short(self.new)}"

    def made(self, source: str) -> str:
        """The source with the change made."""
        lines = source.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return (before + self.new.encode() + after).decode()


def changes_of(file: str, source: str) -> list[Change]:
    """Every change of a module, in the order of the text."""
    changes, lines, tree = [], source.splitlines(), ast.parse(source)
    inside = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.Lambda))
        for part in (node.body if isinstance(node.body, list) else [node.body])
        for line in range(part.lineno, (part.end_lineno or 0) + 1)
    }
    for node, kind, text in _visit(tree):
        old = ast.get_source_segment(source, node)
        assert old is not None
        place = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
        change = Change(file, kind, *place, old, text, lines[node.lineno - 1].strip(), node.lineno not in inside)
        if text.strip("()") != old.strip("()"):
            changes.append(change)
    return sorted(set(changes), key=lambda change: (change.line, change.column, change.kind, change.new))


def _visit(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, (ast.expr, ast.stmt)):
        for kind, text in _of(node):
            yield node, kind, text
    for child in _parts(node):
        yield from _visit(child)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Children that hold computations: no annotations, texts for people, compiled functions."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _SPEECH):
                continue
            if isinstance(child, ast.FunctionDef) and any(
                name in ast.unparse(decorator) for decorator in child.decorator_list for name in _COMPILED
            ):
                continue
            yield child


def _of(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Kinds of changes of one node and the text that replaces it."""
    match node:
        case ast.Compare(ops=ops):
            for place, operator in enumerate(ops):
                for other in _COMPARISONS[type(operator)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = other()
                    yield "comparison", _text(changed)
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", repr(value * 1.5 if value else 1.0)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            changed = copy.deepcopy(node)
            changed.op = _ARITHMETIC[type(operator)]()
            yield "arithmetic", _text(changed)
            yield "dropped term", _text(left)
            if isinstance(operator, (ast.Add, ast.Mult)):
                yield "dropped term", _text(right)
        case ast.AugAssign(op=operator) if type(operator) in _ARITHMETIC:
            changed = copy.deepcopy(node)
            changed.op = _ARITHMETIC[type(operator)]()
            yield "arithmetic", ast.unparse(changed)
            yield "dropped term", "pass"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name.rstrip("_") in _OPPOSITE:
            changed = copy.deepcopy(node)
            opposite = _OPPOSITE[name.rstrip("_")] + "_" * name.endswith("_")
            if isinstance(changed.func, ast.Attribute):
                changed.func.attr = opposite
            else:
                changed.func = ast.Name(id=opposite)
            yield "extreme", _text(changed)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "returned value", "return None"
        case ast.BoolOp(values=values):
            changed = copy.deepcopy(node)
            changed.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield "condition", _text(changed)
            for place in range(len(values)):
                rest = [value for other, value in enumerate(values) if other != place]
                yield "condition", _text(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", f"(bool{_text(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "arithmetic", _text(operand)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition", _text(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
