"""Extension of griffe: docstrings as Markdown.

Roles of reStructuredText become links to public names, or code. Fields of pydantic models have the description of their
``Field`` as docstring; those without one are listed at the end of the docstring of the class.
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
        if _MODELS.isdisjoint(map(str, cls.bases)):
            return
        bare = list[str]()
        for name, member in cls.members.items():
            if not isinstance(member, griffe.Attribute) or not member.annotation or name.startswith("_"):
                continue
            if "property" in member.labels:
                continue
            description, default = _read_field(member)
            member.value = default
            if description and member.docstring is None:
                member.docstring = griffe.Docstring(_ROLE.sub(_link_role, description), parent=member)
            if member.docstring is None:
                bare.append(f"{name}: {member.annotation}" + (f" = {default}" if default is not None else ""))
        if bare and cls.docstring is not None:
            cls.docstring.value += "\n\nFields:\n\n```python\n" + "\n".join(bare) + "\n```\n"


def _read_field(member: griffe.Attribute) -> tuple[str | None, str | None]:
    """The description and the default of a field: of pydantic's ``Field``, or a plain value."""
    if member.value is None:
        return None, None
    call = ast.parse(str(member.value), mode="eval").body
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "Field"):
        return None, str(member.value)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    default = given.get("default", call.args[0] if call.args else None)
    text = None if default is None else ast.unparse(default)
    if "default_factory" in given:
        text = f"{ast.unparse(given['default_factory'])}()"
    described = given.get("description")
    return (ast.literal_eval(described) if described is not None else None), text


def _link_role(role: re.Match[str]) -> str:
    """A link to a public class or function; else code."""
    name = _WIDE.sub("", role.group(1))
    path = read_public_paths().get(name.rpartition(".")[2])
    if name.startswith("partitioner."):
        name = name.rpartition(".")[2]
    return f"[`{name}`][{path}]" if path else f"`{name}`"
