"""The source tree stays readable: imports have one direction, folders are small, no code knows a model by name.

Tests, too, lie in folders, and share code through ``tests/helpers`` alone.
"""

from __future__ import annotations

import ast
import re
import tokenize
import warnings
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

from tests.helpers.paths import ROOT

FLOORS = ("passes", "runtime", "partitioner")  # each may import those before it
LINKED = {
    ROOT / "partitioner" / floor for floor in FLOORS
}  # partitioner/passes is passes, by the name it is imported by
MODULES = sorted(
    path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py") if not LINKED & {*path.parents}
)
FOLDERS = sorted({path.parent for path in MODULES})
OUTSIDE = {"tests", "examples", "benchmarks", "transformers"}
OF_TRANSFORMERS = {Path("partitioner/pretrained"), Path("partitioner/trainers")}  # the folders that may import it

MOST_MODULES = 13  # in a folder, without __init__ and __main__
SMALL = 120  # lines: a shorter module that one other imports is read more easily as a part of it
LONG = 700  # lines: worth a warning
MAX_API_LINES = 100
SMALL_MODULES = {  # module -> why it is one of its own although a single module imports it
    "passes/padding/places.py": "indices that a model reads at, of which the propagation knows the rules only",
    "runtime/state/buffer_updates.py": "one kind of state, as each module of the folder",
    "runtime/execute/overlap.py": "an algorithm of its own: the order of a graph's operators",
    "passes/trace/scans.py": "one more kind of code that can be traced, as each module of the folder",
    "partitioner/cli/train.py": "loads PyTorch, which the other commands start without",
    "partitioner/draw/scaling.py": "a picture: what measures sizes draws nothing",
    "partitioner/report/notebook.py": "what a notebook displays is no part of the page",
    "partitioner/solve/pairwise/alike.py": "colour refinement, an algorithm of its own",
    "partitioner/topology/network_cards.py": "one kind of link",
}
# What describes programs, and what plans them, run no ranks: of the runtime they know the program and its proof.
PLANNING = ("topology", "schedules", "emit", "cost", "solve", "simulate")
OF_RUNTIME = (
    "partitioner.runtime.program",
    "partitioner.runtime.prove",
    "partitioner.runtime.errors",
    "partitioner.runtime.files",
)

TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
TEST_FOLDERS = [ROOT / "tests" / name for name in ("passes", "runtime", "partitioner", "integration")]
MOST_TEST_FILES = 65  # in a folder, with __init__
IMPORT_LINE = re.compile(r"^\s*(?:from|import)\s.*$", re.MULTILINE)

FAMILIES = (
    "llama gpt2 gpt gptneo mistral mixtral qwen gemma bert roberta deberta t5 bart vit falcon phi deepseek "
    "mamba whisper olmo huggingface"
).split()
NAMES = re.compile(rf"(?<![a-z])({'|'.join(FAMILIES)})(?![a-z])", re.IGNORECASE)


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "partitioner" else ("partitioner", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str:
    """``passes`` for ``partitioner.passes.ops.random``: the top-level folder that a module lies in."""
    first, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    return second if first == "partitioner" and second in FLOORS else first


KNOWN = {module_name(path): path for path in MODULES}


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules that a module imports anywhere, in functions and for type checkers too, as they are written."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: write the package's name"
            base = node.module or ""
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in KNOWN else base for a in node.names}
    return frozenset(found)


def own_imports(path: Path) -> list[Path]:
    return [KNOWN[name] for name in imports(path) if name in KNOWN and KNOWN[name] != path]


def code_words(path: Path) -> list[tuple[int, str]]:
    """Line and text of every name and string of a module that is not a docstring."""
    source = (ROOT / path).read_text()
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    with (ROOT / path).open("rb") as file:
        return [
            (token.start[0], token.string)
            for token in tokenize.tokenize(file.readline)
            if token.type in (tokenize.NAME, tokenize.STRING)
            and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        ]


def test_imports_point_down():
    for path in MODULES:
        above = set(FLOORS[FLOORS.index(path.parts[0]) + 1 :])
        outside = OUTSIDE - ({"transformers"} if path.parent in OF_TRANSFORMERS else set())
        assert {floor_of(name) for name in imports(path)} & (above | outside) == set(), path


def test_folders_import_each_other_in_one_direction():
    """The modules in the three roots are the faces of all: they belong to no folder."""
    graph = nx.DiGraph()
    faces = set(map(Path, FLOORS))
    for path in MODULES:
        for other in own_imports(path):
            if path.parent != other.parent and not {path.parent, other.parent} & faces:
                graph.add_edge(path.parent, other.parent, because=(path, other))
    cycles = [sorted(map(str, part)) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert not cycles


def test_what_plans_runs_no_ranks():
    for path in MODULES:
        if path.parts[0] == "partitioner" and path.parts[1] in PLANNING:
            found = {name for name in imports(path) if floor_of(name) == "runtime"}
            assert all(name.startswith(OF_RUNTIME) for name in found), path


def test_folders_are_small():
    counts = Counter(path.parent for path in MODULES if path.name not in ("__init__.py", "__main__.py"))
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_small_modules_have_several_importers_or_a_reason():
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in MODULES:
        for other in own_imports(path):
            importers[other].add(path)
    alone = {
        str(path)
        for path, by in importers.items()
        if path.name != "__init__.py" and len(by) == 1 and len((ROOT / path).read_text().splitlines()) < SMALL
    }
    assert alone == set(SMALL_MODULES)


def test_every_folder_says_what_it_is_for():
    assert [str(folder) for folder in FOLDERS if not (ROOT / folder / "README.md").is_file()] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_readmes_name_every_module_and_no_other(folder: Path):
    """A README may name a file of another folder by its path from the root, or from a folder that contains both."""
    text = (ROOT / folder / "README.md").read_text()
    modules = {path.name for path in MODULES if path.parent == folder} - {"__init__.py", "__main__.py"}
    parts = {path.relative_to(folder).parts[0] + "/" for path in FOLDERS if folder in path.parents}
    assert {name for name in modules if f"\n- `{name}`: " not in text} == set(), "modules that the README does not list"
    assert {name for name in parts if name not in text} == set(), "folders that the README does not list"
    named = set(re.findall(r"(?<![\w/])[a-z_][\w/]*\.py\b", text))
    places = [ROOT / place for place in (folder, *folder.parents)]
    assert {name for name in named if not any((place / name).is_file() for place in places)} == set()


@pytest.mark.filterwarnings("default")
def test_long_modules_are_seen():
    for path in MODULES:
        lines = len((ROOT / path).read_text().splitlines())
        if lines > LONG:
            warnings.warn(f"{path} has {lines} lines; is it one idea?", stacklevel=1)


def test_api_fits_one_screen():
    assert len((ROOT / "partitioner" / "api.py").read_text().splitlines()) <= MAX_API_LINES


def test_test_files_lie_in_folders():
    misplaced = [path for path in TEST_FILES if not any(path.is_relative_to(folder) for folder in TEST_FOLDERS)]
    assert misplaced == []
    counts = Counter(path.parent for path in (ROOT / "tests").rglob("*.py"))
    assert {str(folder): count for folder, count in counts.items() if count > MOST_TEST_FILES} == {}


def test_test_files_import_no_other():
    """An import in a function, in a script that a test writes, and of a bare file name count too."""
    stems = {path.stem for path in TEST_FILES}
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = (node.module or "").split(".")
                names = {*base, *(alias.name for alias in node.names)}
            elif isinstance(node, ast.Import):
                names = {part for alias in node.names for part in alias.name.split(".")}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = {name for line in IMPORT_LINE.findall(node.value) for name in re.findall(r"\w+", line)}
            else:
                continue
            found += [(str(path), node.lineno, name) for name in sorted(names & stems)]
    assert found == []


def test_no_model_is_known_by_name():
    named = [path for path in MODULES if NAMES.search((ROOT / path).read_text())]  # maybe in a docstring or comment
    found = [(path, line, word) for path in named for line, word in code_words(path) if NAMES.search(word)]
    assert found == []
