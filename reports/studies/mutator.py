"""Small faults planted in source text: one operator, constant, condition, argument, dtype, statement or `raise` at a time.

A mutation is found by what it says, not by where it stands: its rank is a hash of the enclosing function, the statement
and the change. Code that moves to another file unchanged is therefore drawn again, and two tables can be compared.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = (
    "operator", "constant", "comparison", "boolean", "return", "branch", "sign", "index", "argument", "dtype", "statement",
    "exception",
)  # fmt: skip
OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Pow: "*",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
NEGATED = {
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
OTHER_DTYPE = {
    "float32": "bfloat16",
    "float64": "float32",
    "bfloat16": "float16",
    "float16": "bfloat16",
    "float8_e4m3fn": "float8_e5m2",
    "float8_e5m2": "float8_e4m3fn",
    "float8_e8m0fnu": "float8_e5m2",
    "int64": "int32",
    "int32": "int64",
    "uint8": "int8",
}
SYMMETRIC = {
    "max",
    "min",
    "equal",
    "array_equal",
    "maximum",
    "minimum",
    "gcd",
    "add",
    "mul",
}  # of two arguments
NUMERIC = {"int", "float", "Tensor", "torch.Tensor"}  # return annotations whose value can be negated


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one expression.

    Attributes:
        path: of the file, relative to the root of the tree.
        line: first line of the expression.
        kind: one of KINDS.
        function: qualified name of the enclosing function or class; "" at module level.
        before: source text of the expression.
        after: what takes its place.
        start: byte offset of the expression in the UTF-8 source.
        end: byte offset behind it.
        key: 16 hexadecimal digits that name the mutation, whichever file it stands in.
    """

    path: str
    line: int
    kind: str
    function: str
    before: str
    after: str
    start: int
    end: int
    key: str = ""

    def apply(self, source: str) -> str:
        """Return the source with the change made.

        Raises:
            ValueError: the source is not the one that the mutation was found in.
        """
        text = source.encode()
        if text[self.start : self.end].decode() != self.before:
            raise ValueError(f"{self.path}:{self.line} no longer reads {self.before!r}; find mutations again")
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


def find(path: str, source: str) -> list[Mutation]:
    """Return every mutation of a file, in the order of its text."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda m: (m.start, m.kind))


def select(mutations: Iterable[Mutation], count: int, seed: int) -> list[Mutation]:
    """Draw mutations, as many of each room and kind as there are, the same ones for the same seed."""
    strata: dict[tuple[str, str], list[tuple[str, Mutation]]] = defaultdict(list)
    for mutation in mutations:
        rank = hashlib.sha256(f"{seed}|{mutation.key}".encode()).hexdigest()
        strata[room_of(mutation.path), mutation.kind].append((rank, mutation))
    queues = [sorted(stratum, key=lambda pair: pair[0]) for stratum in strata.values()]
    queues.sort(key=lambda queue: queue[0][0])  # where the last round ends is chance, not the alphabet
    drawn: list[Mutation] = []
    while len(drawn) < count and any(queues):
        for queue in queues:
            if queue and len(drawn) < count:
                drawn.append(queue.pop(0)[1])
    return drawn


def room_of(path: str) -> str:
    """The folder below the package; `fp8core` has two rooms, the library and its proof."""
    package, _, rest = path.partition("/")
    room = rest.partition("/")[0] if "/" in rest else ""
    return f"{package}/{room}" if room and (package == "harness" or room == "proof") else package


class _Finder(ast.NodeVisitor):
    """Walks a module past what no test could see: annotations, messages, and device code that only a GPU runs."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.text = source.encode()
        self.found: list[Mutation] = []
        self.scope: list[str] = []
        self.returns: list[str] = []
        self.statement = ""
        self.same: Counter[str] = Counter()
        self.line_starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statement = ast.unparse(node)
        super().visit(node)

    def _add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        start = self.line_starts[node.lineno - 1] + node.col_offset
        end = self.line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = self.text[start:end].decode()
        function = ".".join(self.scope)
        said = "|".join((function, self.statement, kind, ast.unparse(node), after))
        self.same[said] += 1
        key = hashlib.sha256(f"{said}|{self.same[said]}".encode()).hexdigest()[:16]
        self.found.append(Mutation(self.path, node.lineno, kind, function, before, after, start, end, key))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self.scope.append(node.name)
        self.returns.append(ast.unparse(node.returns) if node.returns else "")
        for child in node.body:
            self.visit(child)
        self.returns.pop()
        self.scope.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        for child in node.body:
            self.visit(child)
        self.scope.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if "__all__" in [ast.unparse(target) for target in node.targets]:
            return
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "statement", "pass")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self._add(node.test, "branch", f"(not ({ast.unparse(node.test)}))")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Loses the exception; skips its message."""
        self._add(node, "exception", "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "statement", "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            first, second, *rest = map(ast.unparse, node.args)
            named = [f"{word.arg}={value}" if word.arg else f"**{value}" for word in node.keywords
                     for value in [ast.unparse(word.value)]]  # fmt: skip
            if first != second and ast.unparse(node.func).rpartition(".")[2] not in SYMMETRIC:
                swapped = ", ".join([second, first, *rest, *named])
                self._add(node, "argument", f"{ast.unparse(node.func)}({swapped})")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in OTHER_DTYPE and ast.unparse(node.value) in ("torch", "np", "numpy"):
            self._add(node, "dtype", f"{ast.unparse(node.value)}.{OTHER_DTYPE[node.attr]}")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self._add(node, "sign", f"({ast.unparse(node.operand)})")
        elif isinstance(node.op, ast.Not):
            self._add(node, "sign", f"bool({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        whole = ast.unparse(node.value)
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            self._add(node, "index", f"{whole}[{node.slice.value + 1}]")
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skips what states an assumption."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skips messages."""

    def visit_Return(self, node: ast.Return) -> None:
        kind = self.returns[-1] if self.returns else ""
        if node.value is not None:
            text = ast.unparse(node.value)
            if kind == "bool":
                self._add(node.value, "return", f"(not ({text}))")
            elif kind in NUMERIC and text not in ("0", "0.0"):
                self._add(node.value, "return", f"(-({text}))")
            self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operator = OPERATORS.get(type(node.op))
        if operator and not any(_is_text(side) for side in (node.left, node.right)):
            self._add(
                node, "operator", f"(({ast.unparse(node.left)}) {operator} ({ast.unparse(node.right)}))"
            )
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            operator = NEGATED[type(node.ops[0])]
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            self._add(node, "comparison", f"(({left}) {operator} ({right}))")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = " or " if isinstance(node.op, ast.And) else " and "
        self._add(node, "boolean", f"({operator.join(f'({ast.unparse(v)})' for v in node.values)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, "constant", str(not value))
        elif isinstance(value, int):
            self._add(node, "constant", str(value + 1))
        elif isinstance(value, float):
            self._add(node, "constant", repr(value * 2 if value else 1.0))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
