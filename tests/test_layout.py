"""How the source is laid out: which folder may import which, and how long things may be."""

import ast
from pathlib import Path

import pytest

import deeploop

ROOT = Path(deeploop.__file__).parent
# A folder imports itself and those before it.
ORDER = [
    "utils", "kernels", "config", "data", "runs", "model", "eval", "train", "analyze", "cli",
]  # fmt: skip
SOURCES = sorted([*ROOT.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
MAX_LINES, MAX_FUNCTION_LINES = 400, 60


def imported(tree, path):
    """Folders of deeploop that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "deeploop" and len(parts) > 1 and parts[1] in ORDER:
                yield parts[1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_left_to_right(path):
    folder = path.relative_to(ROOT).parts[0]
    if folder in ORDER:
        for other in imported(ast.parse(path.read_text()), path):
            assert ORDER.index(other) <= ORDER.index(folder), f"{folder} imports {other}"


def test_every_folder_has_its_place_in_the_order():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith("_")}
    assert folders == set(ORDER)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    if "triton" in path.parts:
        return  # a Triton kernel is one function
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name
