"""Hooks of mkdocs: pages from files outside ``docs/``, links to them, and formulas as MathML.

Formulas are written as GitHub reads them: in fences of the language ``math``, and inline as ``$`x`$``.

Links in Markdown files are relative to the file, as GitHub follows them. Here a link that leaves ``docs/`` is changed
to the page of its target: README.md, CONTRIBUTING.md and CHANGELOG.md are pages of their own, every other file or
folder of the repository that is linked becomes a page under ``source/``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

# Files of the repository root -> their pages.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_FILES = {page: file for file, page in PAGES.items()}

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_BLOCK_MATH = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
_INLINE_MATH = re.compile(r"\$`([^`\n]+)`\$")
_GITHUB_NOTE = re.compile(r"^> `make docs` fills this page.*\n\n", re.MULTILINE)  # to readers of the Markdown
_LANGUAGES = {".py": "python", ".md": "markdown", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside ``docs/``, and of every such file that a page links."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    linked = {
        target
        for file in files.documentation_pages()
        for link in _LINK.findall(_FENCE.sub("", file.content_string))
        if (target := _resolve_link(file.src_uri, link)) is not None and _is_source(target)
    }
    for target in sorted(linked):
        files.append(File.generated(config, _page_of(target), content=_render_source(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links that leave ``docs/``, and formulas."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    markdown = _GITHUB_NOTE.sub("", markdown)
    markdown = _BLOCK_MATH.sub(lambda math: f"\n{_to_mathml(math.group(1), 'block')}\n", markdown)
    parts, end = list[str](), 0
    for fence in _FENCE.finditer(markdown):
        parts += [_change_text(page.file.src_uri, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, _change_text(page.file.src_uri, markdown[end:])])


def _change_text(page: str, text: str) -> str:
    """Text outside of fences, with links and formulas changed."""
    text = _LINK.sub(lambda link: _change_link(page, link.group()), text)
    return _INLINE_MATH.sub(lambda math: _to_mathml(math.group(1), "inline"), text)


def _to_mathml(formula: str, display: str) -> str:
    made = convert(formula.strip(), display=display).replace("\n", " ")
    return f'<div class="formula">{made}</div>' if display == "block" else f"<span>{made}</span>"


def _change_link(page: str, link: str) -> str:
    """``link`` of a page, to the page of its target."""
    target = _resolve_link(page, link)
    if target is None:
        return link
    anchor = link.partition("#")[2]
    changed = posixpath.relpath(_page_of(target), posixpath.dirname(page) or ".")
    return f"{changed}#{anchor}" if anchor else changed


def _resolve_link(page: str, link: str) -> str | None:
    """The path in the repository that a relative link of a page names; ``None`` for links to pages and other sites.

    Raises :class:`FileNotFoundError` where there is no such file.
    """
    path = link.partition("#")[0]
    if not path or "://" in link or link.startswith("mailto:"):
        return None
    origin = _FILES.get(page) or f"docs/{page}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    if target.startswith("docs/") and origin.startswith("docs/"):
        return None  # mkdocs itself follows and checks it
    if not (ROOT / target).exists():
        raise FileNotFoundError(f"{origin} links {link}: there is no {target}")
    return target


def _is_source(target: str) -> bool:
    return target not in PAGES and not target.startswith("docs/")


def _page_of(target: str) -> str:
    """The page, relative to ``docs/``, of a path in the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return PAGES.get(target) or f"source/{target.strip('.')}.md"


def _render_source(target: str) -> str:
    """The Markdown of a page that shows a file or the names in a folder."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith(("_", ".")))
        return f"# {target}/\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {target}\n\n````{language}\n{path.read_text().rstrip()}\n````\n"
