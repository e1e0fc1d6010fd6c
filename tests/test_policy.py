"""House rules checked on the source text: layering, banned calls, size budgets, names, ASCII.

Every rule is a function from a parsed file to findings; `BAD_SNIPPETS` shows that each one fires.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("src", "tests", "examples", "benchmarks")
# Golden cases come with their own checker, kept as it was given.
DATA_FOLDER = ROOT / "tests" / "data"
PACKAGE = "pcpkit"

# A module imports only modules to its left. `testing` and the package's own __init__ import all of
# them and are imported by none. `config_rules` and its like belong to `config`.
LAYERS = (
    "formats",
    "config",
    "kernels",
    "cache",
    "parallel",
    "plan",
    "model",
    "engine",
    "transfer",
)
UNLAYERED = ("testing", "__init__", "__main__")

MAX_LINES = 400
MAX_LINES_KERNELS = 500
MAX_LINES_OUTSIDE_SRC = 500
MAX_FUNCTION_LINES = 60
# The phases of one kernel share registers and masks; helpers are jit functions of their own.
MAX_JIT_FUNCTION_LINES = 100

BANNED_NAMES = ("utils", "common", "helpers", "misc", "manager")
# Triton reads its mode from the environment, and Hypothesis' profile follows CI=true.
MAY_READ_ENVIRONMENT = ("tests/conftest.py",)
MAY_USE_DISTRIBUTED = ("src/pcpkit/parallel/collectives.py",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One parsed Python file; `path` is relative to the repository, with forward slashes."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def module(self) -> tuple[str, ...]:
        """Dotted name inside pcpkit as a tuple, empty outside it: ('model', 'rope')."""
        parts = Path(self.path).with_suffix("").parts
        return parts[2:] if parts[:2] == ("src", PACKAGE) else ()


Rule = Callable[[SourceFile], Iterator[str]]


def _files() -> list[SourceFile]:
    paths = sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [
        SourceFile(path=path.relative_to(ROOT).as_posix(), text=path.read_text(encoding="utf-8"))
        for path in paths
        if not path.is_relative_to(DATA_FOLDER)
    ]


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; an unknown base becomes `?`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def _is_jit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton (or Gluon) compiles this function."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(_dotted(decorator).split(".")[-1] == "jit" for decorator in decorators)


def _imports(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a file imports, relative imports resolved."""
    package = (PACKAGE, *file.module[:-1])
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def _layer(name: str) -> int | None:
    """Rank of a top-level module of pcpkit, None for a name that is not in `LAYERS`."""
    for rank, layer in enumerate(LAYERS):
        if name == layer or name.startswith(f"{layer}_"):
            return rank
    return None


def layering(file: SourceFile) -> Iterator[str]:
    if not file.module or file.module[0] in UNLAYERED:
        return
    own = _layer(file.module[0])
    if own is None:
        yield f"{file.path}: {file.module[0]} has no place in LAYERS; add it there"
        return
    for line, name in _imports(file):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        target = _layer(parts[1]) if len(parts) > 1 else None
        if target is None:
            yield f"{file.path}:{line}: imports {name}, which is above every layer"
        elif target > own:
            yield f"{file.path}:{line}: {LAYERS[own]} imports {name} from a later layer"


def environment(file: SourceFile) -> Iterator[str]:
    if file.path in MAY_READ_ENVIRONMENT:
        return
    banned = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    remedy = "pass the value as an argument (in a test: monkeypatch.setenv)"
    for line, name in _imports(file):
        if name in banned:
            yield f"{file.path}:{line}: {name}; {remedy}"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and _dotted(node) in banned:
            yield f"{file.path}:{node.lineno}: {_dotted(node)}; {remedy}"


def global_state(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Global):
            yield f"{file.path}:{node.lineno}: global statement; pass the state as an argument"


def device_reads(file: SourceFile) -> Iterator[str]:
    if file.module[:1] != ("kernels",):
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr == "item":
            yield f"{file.path}:{node.lineno}: .item() waits for the device; keep it a tensor"


def distributed(file: SourceFile) -> Iterator[str]:
    if file.path in MAY_USE_DISTRIBUTED:
        return
    remedy = "call parallel/collectives.py"
    for line, name in _imports(file):
        if f"{name}.".startswith("torch.distributed."):
            yield f"{file.path}:{line}: {name}; {remedy}"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and _dotted(node) == "torch.distributed":
            yield f"{file.path}:{node.lineno}: torch.distributed; {remedy}"


def tolerances(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] == "allclose":
            yield (
                f"{file.path}:{node.lineno}: allclose; use torch.equal, or torch.testing."
                "assert_close with a sentence that explains the tolerance"
            )


def block_pointers(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr == "make_block_ptr":
            yield f"{file.path}:{node.lineno}: make_block_ptr; write int64 offsets and a mask"


def swallowed_errors(file: SourceFile) -> Iterator[str]:
    broad = ("Exception", "BaseException")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            catches_all = any(kind is None or _dotted(kind) in broad for kind in caught)
            ignored = all(
                isinstance(statement, ast.Pass | ast.Continue)
                or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                for statement in node.body
            )
            if catches_all and ignored:
                yield f"{file.path}:{node.lineno}: every error is swallowed; name what can happen"
        elif (
            isinstance(node, ast.Call)
            and _dotted(node.func).split(".")[-1] == "suppress"
            and any(_dotted(argument) in broad for argument in node.args)
        ):
            yield f"{file.path}:{node.lineno}: every error is suppressed; name what can happen"


def ascii_only(file: SourceFile) -> Iterator[str]:
    for number, line in enumerate(file.text.splitlines(), start=1):
        if not line.isascii():
            found = next(letter for letter in line if not letter.isascii())
            yield f"{file.path}:{number}: non-ASCII character {found!a}"


def file_names(file: SourceFile) -> Iterator[str]:
    for part in Path(file.path).with_suffix("").parts:
        if part.strip("_").removeprefix("test_") in BANNED_NAMES:
            yield f"{file.path}: {part} says nothing about its content; name the step"


def file_size(file: SourceFile) -> Iterator[str]:
    if not file.module:
        limit = MAX_LINES_OUTSIDE_SRC
    else:
        limit = MAX_LINES_KERNELS if file.module[0] == "kernels" else MAX_LINES
    count = len(file.text.splitlines())
    if count > limit:
        yield f"{file.path}: {count} lines, at most {limit}; split it by step"


def function_size(file: SourceFile) -> Iterator[str]:
    """Lines of code from the first statement after the docstring to the end."""
    if not file.module:
        return
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        count = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        limit = MAX_JIT_FUNCTION_LINES if _is_jit(node) else MAX_FUNCTION_LINES
        if count > limit:
            yield (
                f"{file.path}:{node.lineno}: {node.name} has {count} lines, "
                f"at most {limit}; split it by step"
            )


def annotated(file: SourceFile) -> Iterator[str]:
    """Every parameter and result in src, except in functions that Triton compiles."""
    if not file.module:
        return
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if _is_jit(node):
            continue
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        starred = [arg for arg in (node.args.vararg, node.args.kwarg) if arg is not None]
        bare = [arg.arg for arg in [*named, *starred] if arg.annotation is None]
        bare = [name for name in bare if name not in ("self", "cls")]
        if node.returns is None:
            bare.append("return")
        if bare:
            yield f"{file.path}:{node.lineno}: {node.name} lacks annotations: {', '.join(bare)}"


RULES: tuple[Rule, ...] = (
    layering,
    environment,
    global_state,
    device_reads,
    distributed,
    tolerances,
    block_pointers,
    swallowed_errors,
    ascii_only,
    file_names,
    file_size,
    function_size,
    annotated,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_follows_rule(rule: Rule) -> None:
    files = _files()
    assert len(files) > 5, "the rules read no source files"
    findings = [finding for file in files for finding in rule(file)]
    assert not findings, "\n".join(findings)


KERNEL = "src/pcpkit/kernels/probe.py"
MODEL = "src/pcpkit/model/probe.py"
LONG_FUNCTION = 'def f():\n    """Doc."""\n' + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)
LONG_KERNEL = "@triton.jit\ndef f():\n" + "    x = 1\n" * MAX_JIT_FUNCTION_LINES

BAD_SNIPPETS: list[tuple[Rule, str, str]] = [
    (layering, KERNEL, "from pcpkit.model import rope"),
    (layering, KERNEL, "def f():\n    from ..plan.batch import StepBatch"),
    (layering, "src/pcpkit/formats.py", "import pcpkit.config"),
    (layering, MODEL, "from pcpkit.testing.ranks import RankPool"),
    (layering, MODEL, "from pcpkit import __version__"),
    (layering, "src/pcpkit/newcomer.py", "x = 1"),
    (environment, MODEL, "import os\nx = os.environ.get('A')"),
    (environment, MODEL, "from os import environ"),
    (environment, "examples/probe.py", "import os\nx = os.getenv('A')"),
    (global_state, MODEL, "def f():\n    global x\n    x = 1"),
    (device_reads, KERNEL, "def f(x):\n    return x.max().item()"),
    (distributed, MODEL, "import torch.distributed as dist"),
    (distributed, "tests/probe.py", "from torch import distributed"),
    (distributed, MODEL, "import torch\ntorch.distributed.barrier()"),
    (tolerances, "tests/probe.py", "assert torch.allclose(a, b)"),
    (tolerances, "tests/probe.py", "a.allclose(b)"),
    (block_pointers, KERNEL, "p = tl.make_block_ptr(x)"),
    (swallowed_errors, MODEL, "try:\n    f()\nexcept Exception:\n    pass"),
    (swallowed_errors, MODEL, "for x in y:\n    try:\n        f()\n    except:\n        continue"),
    (swallowed_errors, MODEL, "try:\n    f()\nexcept (KeyError, BaseException):\n    ..."),
    (swallowed_errors, MODEL, "with contextlib.suppress(Exception):\n    f()"),
    (ascii_only, MODEL, "x = 1  # \u2264 2"),
    (file_names, "src/pcpkit/model/utils.py", ""),
    (file_names, "tests/common/test_rope.py", ""),
    (file_names, "tests/model/test_helpers.py", ""),
    (file_size, MODEL, "x = 1\n" * (MAX_LINES + 1)),
    (file_size, KERNEL, "x = 1\n" * (MAX_LINES_KERNELS + 1)),
    (file_size, "tests/probe.py", "x = 1\n" * (MAX_LINES_OUTSIDE_SRC + 1)),
    (function_size, MODEL, LONG_FUNCTION),
    (function_size, KERNEL, LONG_KERNEL + "    x = 1\n"),
    (annotated, KERNEL, "def f(x) -> int: ..."),
    (annotated, MODEL, "class A:\n    def f(self, *args: int): ..."),
]

GOOD_SNIPPETS: list[tuple[Rule, str, str]] = [
    (layering, MODEL, "from pcpkit.kernels import linear\nfrom .rope import table\nimport torch"),
    (layering, "src/pcpkit/config.py", "from pcpkit.config_rules import check"),
    (layering, "src/pcpkit/testing/probe.py", "from pcpkit.engine import engine"),
    (environment, "tests/conftest.py", "import os\nos.environ['TRITON_INTERPRET'] = '1'"),
    (device_reads, MODEL, "x.item()"),
    (distributed, "src/pcpkit/parallel/collectives.py", "import torch.distributed as dist"),
    (tolerances, "tests/probe.py", "torch.testing.assert_close(a, b, rtol=0, atol=0)"),
    (swallowed_errors, MODEL, "try:\n    f()\nexcept FileNotFoundError:\n    pass"),
    (swallowed_errors, MODEL, "try:\n    f()\nexcept Exception:\n    close()\n    raise"),
    (file_size, KERNEL, "x = 1\n" * MAX_LINES_KERNELS),
    (function_size, MODEL, LONG_FUNCTION.replace("    x = 1\n", "", 1)),
    (function_size, KERNEL, LONG_KERNEL),
    (annotated, KERNEL, "@triton.jit\ndef _kernel(x_ptr, BLOCK: tl.constexpr): ..."),
    (annotated, MODEL, "class A:\n    def f(self, *args: int) -> None: ..."),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD_SNIPPETS)
def test_rule_finds(rule: Rule, path: str, text: str) -> None:
    assert list(rule(SourceFile(path=path, text=text)))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD_SNIPPETS)
def test_rule_allows(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(SourceFile(path=path, text=text)))


def test_every_rule_is_shown_to_fire() -> None:
    assert {rule for rule, _, _ in BAD_SNIPPETS} == set(RULES)


def _listed_modules(text: str) -> set[str]:
    """Paths below src/pcpkit in the module map: a folder line, then one indented line a file."""
    block = text.split("```text\nsrc/pcpkit/\n")[1].split("```")[0]
    listed: set[str] = set()
    folder = ""
    for line in block.splitlines():
        name = line.split(maxsplit=1)[0]
        indent = len(line) - len(line.lstrip())
        if name.endswith("/"):
            folder = name
        else:
            listed.add(name if indent == 2 else folder + name)
    return listed


def test_architecture_lists_every_module() -> None:
    """The module map of ARCHITECTURE.md has one line for each module, and no other."""
    listed = _listed_modules((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    existing = {
        "/".join(file.module) + ".py"
        for file in _files()
        if file.module and file.module[-1] != "__init__"
    }
    assert listed == existing, (
        f"ARCHITECTURE.md section 2: no line for {sorted(existing - listed)}, "
        f"no module for {sorted(listed - existing)}"
    )
