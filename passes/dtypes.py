"""Names and sizes of tensor dtypes in programs and serialized graphs, without an import of PyTorch.

Importing PyTorch takes seconds. Code that only reads a plan (summary, explanation, pictures) needs only this module.
"""

from __future__ import annotations

# Bytes of one element. ``tests/integration/test_imports.py`` compares the table with PyTorch's own types.
FLOATING = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
OTHERS = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


def get_dtype_itemsize(name: str) -> int:
    """Return the number of bytes of one element of the dtype with the name ``name``, such as ``bfloat16``.

    Raise ``GraphFormatError`` if there is no such dtype.
    """
    size = FLOATING.get(name) or OTHERS.get(name)
    if size is not None:
        return size
    from partitioner.passes.ir.serialize import dtype_of

    return int(dtype_of(name).itemsize)


def is_floating(name: str) -> bool:
    """Return whether the dtype with the name ``name``, such as ``bfloat16``, is a floating-point type.

    Raise ``GraphFormatError`` if there is no such dtype.
    """
    if name in FLOATING or name in OTHERS:
        return name in FLOATING
    from partitioner.passes.ir.serialize import dtype_of

    return bool(dtype_of(name).is_floating_point)


def sum_type(name: str) -> str:
    """Return the name of the dtype in which elements of the dtype ``name``, such as ``bfloat16``, are summed:
    ``float32`` for floating-point types of less than 4 bytes, ``name`` itself otherwise."""
    return "float32" if is_floating(name) and get_dtype_itemsize(name) < 4 else name
