"""The rooms of the code: imports have one direction, and a name is taken from the module that defines it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "train_gpt.py", ROOT / "triton_kernels.py",
         *(path for folder in ("data", "data/run", "records") for path in sorted((ROOT / folder).glob("*.py")))]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def defined(tree):
    """The names that a module defines at its top level, also under a condition."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
NAMES = {name: defined(tree) for name, tree in TREES.items()}


def imports(tree):
    """(module, name in it or None, name here) of each import of our own code, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, alias.asname or alias.name) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in MODULES:
                    yield whole, None, alias.asname or alias.name
                elif node.module in MODULES:
                    yield node.module, alias.name, alias.asname or alias.name


@pytest.mark.parametrize("module", MODULES)
def test_names_come_from_where_they_are_defined(module):
    found, tree = [*imports(TREES[module])], TREES[module]
    wrong = [f"{name} of {source}" for source, name, _ in found if name and name not in NAMES[source]]
    alias = {here: source for source, name, here in found if name is None}
    wrong += [f"{node.attr} of {alias[node.value.id]}" for node in ast.walk(tree)
              if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in alias
              and node.attr not in NAMES[alias[node.value.id]]]
    assert wrong == []


def test_no_circle():
    """Programs, which nothing imports, may import everything."""
    edges = {module: {source for source, *_ in imports(tree)} for module, tree in TREES.items()}

    def reached(module, path=()):
        assert module not in path, " -> ".join((*path, module))
        for source in edges[module]:
            reached(source, (*path, module))
    for module in MODULES:
        reached(module)
    assert len(edges["train_gpt"]) > 10


def test_data_does_not_know_the_trainer():
    for module in MODULES:
        if module.startswith("data") and module != "data.prepare" or module == "triton_kernels":
            sources = {source.split(".")[0] for source, *_ in imports(TREES[module])}
            assert not sources & {"train_gpt", "records"}, module


def test_only_main_imports_records():
    """The script's other functions do not know the tools that read runs."""
    found = [node.name for node in TREES["train_gpt"].body if not isinstance(node, (ast.Import, ast.ImportFrom))
             and any(source.startswith("records") for source, *_ in imports(node))]
    assert found == ["main"]


def test_rooms_that_need_no_package():
    """Programs import them before slow packages, or start without these."""
    subprocess.run([sys.executable, "-S", "-c", "import data.run.config, data.run.launch"], cwd=ROOT, check=True)


def test_table_of_the_kernels():
    """The table at the top of triton_kernels.py names operations of each section and its lines, within a tenth."""
    text = (ROOT / "triton_kernels.py").read_text()
    sections = dict(re.findall(r"^# (\d+)  (.*?)(?=^# =+\n# (?:\d+  |The choice)|\Z)", text, re.M | re.S))
    rows = re.findall(r"^  (\d+)  +([\w, ;]+?)  .* (\d+)$", text.partition('\n"""\n')[0], re.M)
    assert [row[0] for row in rows] == list(sections)
    for number, names, lines in rows:
        assert all(re.search(rf"^(def|class) {name}\(|^class {name}:|^{name} = operation\(", sections[number], re.M)
                   for name in re.split("[,;] ", names)), number
        assert sections[number].count("\n") == pytest.approx(int(lines), rel=0.1), number
