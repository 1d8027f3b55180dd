"""The layout of the source: which folder may import which, lengths, and what is packaged."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import deeploop
import deeploop.kernels
from deeploop.config.depth import DEPTHS
from deeploop.config.loop_count import LOOP_COUNTS
from deeploop.config.train import LOSSES

ROOT = Path(deeploop.__file__).parent
KERNELS = Path(deeploop.kernels.__file__).parent
# A folder imports itself and those before it.
ORDER = [
    "utils", "kernels", "config", "data", "runs", "model", "eval", "train", "analyze", "cli",
]  # fmt: skip
SOURCES = {path: path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))}
SOURCES |= {path: "kernels" / path.relative_to(KERNELS) for path in sorted(KERNELS.rglob("*.py"))}
every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(SOURCES[path]))
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


@every_source
def test_imports_go_left_to_right(path):
    folder = SOURCES[path].parts[0]
    if folder in ORDER:
        for other in imported(ast.parse(path.read_text()), path):
            assert ORDER.index(other) <= ORDER.index(folder), f"{folder} imports {other}"


def test_every_folder_has_its_place_in_the_order():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith("_")}
    assert folders | {"kernels"} == set(ORDER)


@every_source
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


def test_a_checkout_has_no_link_and_names_nothing_but_its_kernels():
    """A .zip of the repository turns links into files, as does git on Windows."""
    checkout = ROOT.parent
    assert not any(p.is_symlink() for p in (*ROOT.rglob("*"), *KERNELS.rglob("*")))
    assert (checkout / "kernels") == KERNELS
    assert all(find_spec(f"deeploop.{name}") is None for name in ("tests", "bench", "setup"))


def test_a_checkout_on_the_path_is_used_beside_an_editable_install_of_another(tmp_path):
    """setuptools' finder of an editable install answers for every module of the package."""
    script = f"""
import importlib.util, sys
class Other:
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, {str(tmp_path / "other.py")!r})
sys.meta_path.append(Other)
print(importlib.util.find_spec("deeploop.kernels").origin)
"""
    environment = {"PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == str(ROOT.parent / "kernels" / "__init__.py"), result.stderr


def test_every_folder_is_packaged(monkeypatch):
    setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT.parent)
    exec((ROOT.parent / "setup.py").read_text(), {})
    folders = {path.parent for path in SOURCES.values() if path.name == "__init__.py"}
    assert set(given["packages"]) == {".".join(("deeploop", *f.parts)) for f in folders}
    assert given["package_dir"] == {"deeploop.kernels": "kernels"}
    assert given["package_data"] == {"deeploop": ["py.typed"]} and (ROOT / "py.typed").exists()


def test_no_shared_file_tests_the_name_of_a_choice():
    """Depth rules, losses, draws and solvers: a comparison with a name stands in its own file."""
    depths, losses = set(DEPTHS) - {"fixed", "gate"}, set(LOSSES) - {"last", "each", "gate"}
    names = depths | losses | set(LOOP_COUNTS) - {"fixed", "set"}
    for path, name in SOURCES.items():
        if str(name.parent) in ("config/presets", "model/depth", "train/losses"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}
                found = names & {x for x in constants if isinstance(x, str)}
                assert not found, f"{name}:{node.lineno} tests the name {found}"
