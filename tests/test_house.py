"""The house rules: who may import whom, what may be imported where, and how long things may grow."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "nemotron_ultra"
FILES = sorted(SRC.rglob("*.py"))

LEVELS = {
    "errors": 0,
    "config": 1,
    "ops": 2,
    "data": 2,
    "observe": 2,
    "model": 3,
    "precision": 3,
    "objectives": 4,
    "engine": 5,
    "generation": 5,
    "rl": 5,
    "cluster": 5,
    "trainers": 6,
    "pipeline": 8,  # runs the train entry point, stage after stage
}
ENTRY = 7
HEAVY = {"mamba_ssm", "causal_conv1d", "transformer_engine", "vllm", "megatron", "ray"}
ADAPTERS = {"ops/with_mamba_ssm.py", "ops/with_te.py", "ops/with_flash.py", "engine/megatron_engine.py"}
ADAPTERS |= {"generation/vllm_generator.py"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 12
MAX_NESTING = 3
# May only shrink. Kernels are one thing each, so their files may be longer.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def room(path: Path) -> str:
    """The first folder under the package, or the module name for files at its top."""
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute module names imported anywhere in a file, but for those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import at line {node.lineno}"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def test_imports_only_go_down():
    wrong = []
    for path in FILES:
        mine = room(path)
        level = LEVELS.get(mine, ENTRY)
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] != "nemotron_ultra" or len(parts) == 1:
                continue
            theirs = parts[1]
            if theirs != mine and theirs != "__version__" and LEVELS.get(theirs, ENTRY) >= level:
                wrong.append(f"{path.relative_to(SRC)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_torch_below_level_two():
    wrong = [
        f"{path.relative_to(SRC)}:{line}"
        for path in FILES
        if LEVELS.get(room(path), ENTRY) < 2
        for name, line in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert not wrong, wrong


def test_heavy_libraries_only_in_adapters():
    wrong = [
        f"{path.relative_to(SRC)}:{line} imports {name}"
        for path in FILES
        if str(path.relative_to(SRC)) not in ADAPTERS
        for name, line in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_sizes(path: Path):
    name = str(path.relative_to(SRC))
    lines = len(path.read_text().splitlines())
    assert lines <= LONG_FILES.get(name, MAX_FILE_LINES), f"{name} has {lines} lines"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{name}:{node.name}"
            length = node.end_lineno - node.lineno + 1
            assert length <= LONG_FUNCTIONS.get(where, MAX_FUNCTION_LINES), f"{where} has {length} lines"
            arguments = node.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            assert count <= MAX_PARAMETERS, f"{where} has {count} parameters"
            assert nesting(node) <= MAX_NESTING, f"{where} is nested {nesting(node)} deep"


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest stack of for, while, if, with and try inside a function (an elif does not count as deeper)."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        inner = isinstance(child, ast.For | ast.While | ast.If | ast.With | ast.Try)
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        deepest = max(deepest, nesting(child, depth + (inner and not is_elif)))
    return deepest


def test_fit_stays_small():
    body = ast.parse((SRC / "trainers" / "loop.py").read_text()).body
    fit = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "fit")
    assert fit.end_lineno - fit.lineno + 1 < 30


def test_forbidden_idioms():
    wrong = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(word in line for word in ("hasattr(", "_target_", "NotImplementedError")):
                wrong.append(f"{path.relative_to(SRC)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)
