"""A metaclass for pydantic models that lets ``help()`` show the model's fields and their descriptions.

``help()`` on a plain pydantic model prints pydantic's methods and none of the fields. For a class with the metaclass
:class:`DocumentedModel`, the docstring ends with a list of the fields and their descriptions, ``dir()`` leaves out the
attributes that every pydantic model inherits, and the signature shows argument names and defaults, but no types.
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
_LONGEST_DEFAULT = 40  # maximum number of characters of a default
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
    """Return ``docstring``, that of a class with the metaclass :class:`DocumentedModel`, without the list of fields at
    its end."""
    return docstring.partition(f"\n\n{HEADING}\n")[0]


def _describe_field(cls: type[BaseModel], name: str, field: FieldInfo) -> str:
    """Return the text that describes one field in a docstring: a line with its name, type and default, then its
    indented description.

    ``name``: the field's name in the model class ``cls``. ``field``: pydantic's object for the field, with default and
    description.
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
    """Return a signature with a keyword argument for each field: its name, or its alias if it has one, and its default,
    but no type.

    ``fields``: field name -> pydantic's object for the field.
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
