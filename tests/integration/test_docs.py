"""The documentation: navigation, links, the reference of public names, and the page of the command line."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import partitioner
from docs.site import write_profiles
from docs.site.write_cli import PAGE, describe_command_line
from partitioner.cli.app import app
from tests.helpers.command_line import invoke
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
FROM_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PAGES = [*(ROOT / name for name in FROM_ROOT.values()), *sorted(DOCS.rglob("*.md"))]
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
# a file and names that it defines: `partitioner/api.py`: `partition`, `other`
DEFINED = re.compile(r"`((?:partitioner|passes|runtime)/[\w/]+\.py)`:((?:,?\s+`\w+`)+)")
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def list_navigation(entries: list[Any]) -> list[str]:
    """The pages of a part of the navigation, in order."""
    found = []
    for entry in entries:
        (target,) = entry.values() if isinstance(entry, dict) else (entry,)
        found += list_navigation(target) if isinstance(target, list) else [target]
    return found


def read_defined_name(path: str) -> object:
    """What a page of the reference documents: a module, or a name in one."""
    home, _, name = path.rpartition(".")
    module = import_module(home)
    return getattr(module, name) if hasattr(module, name) else import_module(path)


def name_anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


OPTIONAL = {"PartitionedStrategy": "lightning", "PartitionedLoop": "ray"}  # name -> the package that it needs


def test_every_page_is_in_the_navigation_once():
    navigation = list_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(navigation) == sorted([*FROM_ROOT, *written])


def test_reference_has_every_public_name_once():
    paths = [path for page in (DOCS / "reference").glob("*.md") for path in REFERENCE.findall(page.read_text())]
    documented = [path.rpartition(".")[2] for path in paths]
    assert sorted(documented) == sorted([*partitioner.__all__, *partitioner.OPTIONAL])
    for path, name in zip(paths, documented, strict=True):
        if name in OPTIONAL and find_spec(OPTIONAL[name]) is None:
            continue
        assert read_defined_name(path) is getattr(partitioner, name), path


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_name_files_and_headings_that_exist(page: Path):
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in name_anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_page_of_the_command_line_is_current():
    assert PAGE.read_text() == describe_command_line(), "run: python docs/site/write_cli.py"


def test_tables_of_execution_profiles_are_those_of_the_code():
    page = write_profiles.PAGE.read_text()
    assert page == write_profiles.insert_tables(page), "run: python docs/site/write_profiles.py"


@pytest.mark.parametrize("name", ["architecture.md", "optimization.md"])
def test_functions_are_defined_in_the_files_that_a_page_names(name: str):
    found = [
        (path, symbol)
        for path, symbols in DEFINED.findall((DOCS / name).read_text())
        for symbol in re.findall(r"\w+", symbols)
    ]
    assert found
    texts = {path: (ROOT / path).read_text() for path, _ in found}
    defines = {path: set(re.findall(r"^ *(?:def|class) (\w+)", text, re.MULTILINE)) for path, text in texts.items()}
    missing = [f"{path}: {symbol}" for path, symbol in found if symbol not in defines[path]]
    assert missing == []


def list_commands(page: Path) -> list[list[str]]:
    """The commands of this project in the shell blocks of ``page``, without the word ``partitioner`` and redirections.
    Lines of usage are left out."""
    found = []
    for language, text in BLOCK.findall(page.read_text()):
        if language in ("sh", "bash", "console"):
            lines = re.sub(r"\\\n\s*", " ", text).splitlines()
            words = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines]
            words = [list(takewhile(lambda word: word not in (">", "|", "&&"), each)) for each in words]
            found += [each[1:] for each in words if each and each[0] == "partitioner" and "[OPTIONS]" not in each]
    return found


def check_command(words: list[str]) -> None:
    """Parse a command as the command line does, and refuse one that reads a file of this project that is not there."""
    commands = get_command(app)
    context = commands.make_context("partitioner", list(words))
    command = commands.get_command(context, words[0])
    assert command is not None, words
    command.make_context(words[0], list(words[1:]), parent=context)
    missing = [word for word in words if word.startswith("examples/") and not (ROOT / word.partition(":")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_in_shell_blocks_are_accepted(page: Path):
    for words in list_commands(page):
        check_command(words)


def test_what_is_no_command_is_found(tmp_path: Path):
    assert len(list_commands(ROOT / "README.md")) >= 9
    page = tmp_path / "page.md"
    page.write_text("```sh\npartitioner plan m/ \\\n  --topology local:2 --sequence 4  # words\n```\n")
    (words,) = list_commands(page)
    assert words == ["plan", "m/", "--topology", "local:2", "--sequence", "4"]
    with pytest.raises(Exception, match="--sequence"):
        check_command(words)


def test_the_commands_for_a_hugging_face_folder_run_as_the_readme_has_them(tmp_path: Path, monkeypatch: Any):
    """Folder, lengths and cluster are those of the README; the model is small."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, **sizes}
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    commands = list_commands(ROOT / "README.md")
    start = next(i for i, words in enumerate(commands) if words[:2] == ["plan", "my-model/"])
    for words in commands[start : start + 4]:
        result = invoke(*words)
        assert result.exit_code == 0, f"{words}: {result.output}"
    made = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert made == {"plan.json", "plan.svg", "plan.html", "planned.py", "ds_config.json"}
