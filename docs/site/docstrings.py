"""Extension of griffe: docstrings as Markdown.

Roles of reStructuredText become links to public names, or code. Fields of pydantic models that have no docstring of
their own are listed at the end of the docstring of the class.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

PACKAGE = Path(__file__).resolve().parents[2] / "partitioner" / "__init__.py"

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc|obj):`~?([^`]+)`")
_BLOCK = re.compile(r"::$", re.MULTILINE)
_MODELS = frozenset(("BaseModel", "Data"))
_WIDE = re.compile(r"(?<=\S)\s*\n\s+(?=\S)")


@cache
def read_public_paths() -> dict[str, str]:
    """Public name -> path of its definition, as the tables of ``partitioner/__init__.py`` have it."""
    for statement in ast.parse(PACKAGE.read_text()).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "_HOMES":
            homes = ast.literal_eval(statement.value)  # type: ignore[arg-type]
            return {name: f"{home}.{name}" for home, names in homes.items() for name in names if name != "debug"}
    raise LookupError(f"{PACKAGE} has no table _HOMES")


class MarkdownDocstrings(griffe.Extension):
    """Changes each docstring when its object is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(_link_role, obj.docstring.value)
            obj.docstring.value = _BLOCK.sub(":", text)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        fields = [
            f"{name}: {member.annotation}" + (f" = {member.value}" if member.value is not None else "")
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute) and member.annotation and member.docstring is None
            if not name.startswith("_") and "property" not in member.labels
        ]
        if cls.docstring is not None and fields and not _MODELS.isdisjoint(map(str, cls.bases)):
            cls.docstring.value += "\n\nFields:\n\n```python\n" + "\n".join(fields) + "\n```\n"


def _link_role(role: re.Match[str]) -> str:
    """A link to a public class or function; else code."""
    name = _WIDE.sub("", role.group(1))
    path = read_public_paths().get(name.rpartition(".")[2])
    if name.startswith("partitioner."):
        name = name.rpartition(".")[2]
    return f"[`{name}`][{path}]" if path else f"`{name}`"
