"""A metaclass for pydantic models that lets ``help()`` show the model's fields and their descriptions.

``help()`` on a plain pydantic model prints the methods of pydantic and none of the fields. A class with the metaclass
:class:`DocumentedModel` differs in three ways. Its docstring ends with a list of its fields and their descriptions. Its
``dir()`` leaves out the attributes that every pydantic model inherits. Its signature shows argument names and defaults,
but no types.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any, dataclass_transform

from pydantic import BaseModel, Field, PrivateAttr
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

HEADING = "Fields:"
_INHERITED = frozenset(dir(BaseModel)) | {"model_config"}
_LONGEST_DEFAULT = 40  # characters
_WIDTH = 104


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, PrivateAttr))
class DocumentedModel(ModelMetaclass):
    """The metaclass of pydantic models whose docstring ends with a list of their fields and descriptions, so that
    ``help()`` shows them.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        cls: Any = super().__new__(mcs, name, bases, namespace, **options)
        fields = cls.__pydantic_fields__
        if fields:
            own = inspect.cleandoc(namespace.get("__doc__") or "")
            cls.__doc__ = f"{own}\n\n{HEADING}\n" + "\n".join(_describe_field(cls, n, f) for n, f in fields.items())
            cls.__signature__ = _build_signature(fields)
        return cls

    def __dir__(cls) -> list[str]:
        own = {name for base in cls.__mro__ if base not in (BaseModel, object) for name in vars(base)}
        return sorted(name for name in own if name not in _INHERITED and not name.startswith("_"))


def strip_fields(docstring: str) -> str:
    """Return ``docstring``, the docstring of a class with the metaclass :class:`DocumentedModel`, without the list of
    fields at its end."""
    return docstring.partition(f"\n\n{HEADING}\n")[0]


def _describe_field(cls: type[BaseModel], name: str, field: FieldInfo) -> str:
    """Return the lines of a docstring that describe one field: its name, type and default, then its description,
    indented.

    ``name``: the field's name in the model class ``cls``. ``field``: pydantic's description of it, with the default and
    the text.
    """
    kinds = (inspect.get_annotations(base) for base in cls.__mro__)
    kind = next(found[name] for found in kinds if name in found)
    line = f"    {name}: {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"
    if not field.is_required():
        default = repr(field.get_default(call_default_factory=True, validated_data={}))
        line += f" = {default if len(default) <= _LONGEST_DEFAULT else '...'}"
    text = " ".join((field.description or "").split())
    return "\n".join([line, *textwrap.wrap(text, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)])


def _build_signature(fields: dict[str, FieldInfo]) -> inspect.Signature:
    """Return a signature with one keyword argument for each field, with its default and without a type. An alias
    replaces the name.

    ``fields``: pydantic's description of each field, by the field's name.
    """
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                field.alias or name,
                inspect.Parameter.KEYWORD_ONLY,
                default=empty
                if field.is_required()
                else field.get_default(call_default_factory=True, validated_data={}),
            )
            for name, field in fields.items()
        ]
    )
