"""The documentation: navigation, links, the reference of public names, and the page of the command line."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import partitioner
from docs.site import write_profiles
from docs.site.write_cli import PAGE, describe_command_line
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
FROM_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PAGES = [*(ROOT / name for name in FROM_ROOT.values()), *sorted(DOCS.rglob("*.md"))]
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```\s*$", re.MULTILINE | re.DOTALL)
# a file and names that it defines: `partitioner/api.py`: `partition`, `other`
DEFINED = re.compile(r"`((?:partitioner|passes|runtime)/[\w/]+\.py)`:((?:,?\s+`\w+`)+)")
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
