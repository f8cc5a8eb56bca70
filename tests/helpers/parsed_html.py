"""The elements of an HTML page, as a browser's parser sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "img", "br", "hr", "link"}


@dataclass
class Node:
    """An element. ``text``: its own text and that of all elements in it."""

    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    parents: tuple[Node, ...] = ()
    text: str = ""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.nodes: list[Node] = []
        self.open: list[Node] = []
        self.doctype = ""

    def handle_decl(self, decl: str) -> None:
        self.doctype = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs), tuple(self.open))
        self.nodes.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends {self.open[-1].tag}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for node in self.open:
            node.text += data


def parse_html(text: str) -> list[Node]:
    """Return the elements of a page in order. Fails if a tag is not closed, or ends another element."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open, [node.tag for node in reader.open]
    return reader.nodes
