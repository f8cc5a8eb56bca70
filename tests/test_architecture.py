"""The architecture holds: imports only point down, files stay readable, and no code knows a model by name."""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("passes", "runtime", "partitioner")  # each may import those before it
MODULES = sorted(path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
OUTSIDE = {"tests", "examples", "benchmarks", "transformers"}

MAX_LINES = 700
MAX_API_LINES = 100
LONGER: dict[str, str] = {}  # module -> why it is one idea all the same

FAMILIES = (
    "llama gpt2 gpt gptneo mistral mixtral qwen gemma bert roberta deberta t5 bart vit falcon phi deepseek "
    "mamba whisper olmo huggingface"
).split()
NAMES = re.compile(rf"(?<![a-z])({'|'.join(FAMILIES)})(?![a-z])", re.IGNORECASE)


def imports(path: Path) -> set[str]:
    """The top-level packages that a module imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: write the package's name"
            found.add((node.module or "").split(".")[0])
    return found


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


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_down(path: Path):
    above = set(FLOORS[FLOORS.index(path.parts[0]) + 1 :])
    assert imports(path) & (above | OUTSIDE) == set()


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_are_short(path: Path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= MAX_LINES or str(path) in LONGER, f"{lines} lines: two ideas, or a reason in LONGER"


def test_no_stale_exceptions():
    assert {p for p in LONGER if len((ROOT / p).read_text().splitlines()) <= MAX_LINES} == set()


def test_api_fits_one_screen():
    assert len((ROOT / "partitioner" / "api.py").read_text().splitlines()) <= MAX_API_LINES


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_model_is_known_by_name(path: Path):
    assert [(line, word) for line, word in code_words(path) if NAMES.search(word)] == []
