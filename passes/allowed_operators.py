"""Decide which operators a plan file may name.

A plan file is data that may come from somebody else. Its graphs name operators, and an operator is code: one that reads
a file or changes a setting of the process must not run because a file says so. Allowed are

* operators of ``aten`` that compute tensors from tensors and numbers, and change nothing else. The operator's schema
  decides (:func:`find_aten_obstacle`);
* the operators of this project, ``partition``;
* operators of libraries that the user named with :func:`allow_operators` or in the environment variable
  ``PARTITION_ALLOW_OPERATORS``, or to which the user gave a sharding rule;
* operators in models of this process, whose code the user runs anyway.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from partitioner.passes.errors import UntrustedOperatorError

if TYPE_CHECKING:  # reports read plans without PyTorch
    import torch

NAMESPACE = "partition"
ENVIRONMENT = "PARTITION_ALLOW_OPERATORS"  # names as for allow_operators, separated by commas

_MODULES = ("random", "experts", "fp8", "cross_entropy", "recurrent")  # modules of passes/ops with operators of plans

_NEVER_WHOLE = frozenset({"aten", "prim", "prims", "profiler", "debugprims", "rngprims", "inductor", "quantized"})
_NAME = re.compile(r"[A-Za-z_]\w*(?:(?:::|\.)\w+(?:\.\w+)?)?", re.ASCII)

# Types of arguments that a JSON value can represent. Others, such as a storage or a stream, are handles of the process.
_PLAIN_ARGUMENTS = re.compile(r"(?:Optional|List|Tensor|int|float|number|bool|str|complex|Device|Generator|[\[\]])*")
_FILE_ARGUMENT = re.compile("file|path|name", re.IGNORECASE)

# Private operators of aten check their arguments less than public ones. Graphs of models contain only these.
_PRIVATE = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _batch_norm_with_update _batch_norm_with_update_functional _cdist_backward _cdist_forward _conj _conj_physical
    _conv_depthwise2d _convolution _ctc_loss _ctc_loss_backward _embedding_bag _euclidean_dist
    _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine _fft_c2c _fft_c2r
    _fft_r2c _fused_rms_norm _fused_rms_norm_backward _grouped_mm _linalg_det _linalg_eigh _linalg_eigvals
    _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _log_softmax_backward_data _masked_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _neg_view
    _pdist_backward _pdist_forward _prelu_kernel _prelu_kernel_backward _reshape_copy _safe_softmax
    _sample_dirichlet _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_grouped_mm _scaled_mm _shape_as_tensor _softmax
    _softmax_backward_data _stack _standard_gamma _to_copy _trilinear _unsafe_index _unsafe_index_put
    _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bicubic2d_aa
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward _weight_norm
    _weight_norm_interface _weight_norm_interface_backward
    """.split()
)

_libraries: set[str] = set()
_operators: set[str] = set()  # "mylib::swiglu"
_met: set[str] = set()  # operators of models of this process, with their names in plans
_checked: set[str] = set()  # operators found to be allowed, with their names in plans


def allow_operators(*names: str) -> None:
    """Allow plan files to name operators of the given libraries, in this process from now on.

    ``names``: a library, such as ``"mylib"``, for all of its operators, or one operator, such as ``"mylib::swiglu"``.
    Only allow libraries whose operators you would let a stranger call with any arguments. An operator with a sharding
    rule (:func:`rule`) is already allowed. Raise :class:`UntrustedOperatorError` if a name is not of this form or is a
    whole library of torch, whose operators can read files and change settings.

        >>> allow_operators("mylib")
    """
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UntrustedOperatorError(
                f"{name!r} is no name of operators; expected a library such as 'mylib', or an operator such as "
                "'mylib::swiglu'"
            )
        library, *rest = re.split(r"::|\.", name, maxsplit=1)
        if not rest and (library in _NEVER_WHOLE or library.startswith(("c10d", "_"))):
            raise UntrustedOperatorError(
                f"{name!r} is a library of torch, and some of its operators read files or change settings; name the "
                f"operators that you need one by one, such as '{name}::NAME'"
            )
        if rest:
            _operators.add(f"{library}::{rest[0].partition('.')[0]}")
        else:
            _libraries.add(library)


@cache
def _allow_from_environment() -> None:
    """Allow plans to name the operators and libraries in the environment variable ``PARTITION_ALLOW_OPERATORS``,
    separated by commas. Further calls do nothing. Raise :class:`UntrustedOperatorError` for text that is not the name
    of an operator or library."""
    allow_operators(*(name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",") if name.strip()))


def note_operator_of_model(target: torch._ops.OpOverload) -> None:
    """Allow plans that this process reads to name the operator ``target``, which a model of this process calls."""
    _met.add(str(target))


def check_node_operators(nodes: Iterable[Mapping[str, Any]], block: str) -> None:
    """Raise :class:`UntrustedOperatorError` if a graph of a plan file names an operator that is not allowed. The error
    has the name of the block and the node.

    ``nodes``: the graph's nodes as dicts of JSON data, with the operator's name at the key ``target``. ``block``: the
    name of the block with the graph.
    """
    for node in nodes:
        name = node.get("target")
        if isinstance(name, str) and name not in _checked:
            try:
                check_operator(name)
            except UntrustedOperatorError as error:
                raise UntrustedOperatorError(f"block {block!r}, node {node.get('name')!r}: {error}") from None


def check_operator(name: str) -> None:
    """Raise :class:`UntrustedOperatorError` unless plan files may name the operator ``name``, such as
    ``aten.add.Tensor`` or ``getitem``.
    """
    if name in _checked or name in _met or name == "getitem":
        return
    _allow_from_environment()
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if library in _libraries or f"{library}::{packet}" in _operators:
        return
    if library == NAMESPACE:
        obstacle = "" if find_operator(name) is not None else "there is no such operator in this version"
    elif library == "aten":
        found = find_operator(name)
        obstacle = "torch has no such operator" if found is None else find_aten_obstacle(found)
    elif not packet or not overload:
        obstacle = "it is no name of an operator"
    else:
        obstacle = f"the library {library!r} was not allowed"
    if obstacle:
        raise UntrustedOperatorError(
            f"operator {name!r} is refused: {obstacle}; a plan file may name operators of aten that compute tensors, "
            "and operators of libraries that you trust: import the library and call "
            f"partitioner.allow_operators({_suggest_argument(name)!r}) first, or set "
            f"{ENVIRONMENT}={_suggest_argument(name)}"
        )
    _checked.add(name)


def _suggest_argument(name: str) -> str:
    """Return the argument of :func:`allow_operators` that allows the operator ``name``, for an error message: its
    library, or the operator itself if its library must not be allowed as a whole."""
    library, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    text = f"{library}::{packet}" if packet and library in _NEVER_WHOLE else library
    return text if _NAME.fullmatch(text) else "LIBRARY"


def find_operator(name: str) -> torch._ops.OpOverload | None:
    """Return the torch operator with the name ``name``, such as ``aten.add.Tensor``; ``None`` if no imported library
    has it. Whether plan files may name the operator is not checked."""
    import torch

    if name.startswith(f"{NAMESPACE}."):
        for module in _MODULES:
            importlib.import_module(f"partitioner.passes.ops.{module}")
    parts = name.split(".")
    if len(parts) != 3:
        return None
    target: Any = torch.ops
    try:
        for part in parts:
            target = getattr(target, part)
    except (AttributeError, RuntimeError, ImportError):
        return None
    return target if isinstance(target, torch._ops.OpOverload) else None


def find_aten_obstacle(target: torch._ops.OpOverload) -> str:
    """Return the reason why plans may not name the operator ``target`` of the library aten, as text; an empty string if
    they may.

    Plans may name an operator if its schema says that it returns tensors, writes to no argument, and takes only
    tensors, numbers, types and strings. An operator without tensor arguments may take no strings, which could name a
    file. An operator whose name starts with ``_`` must also be in a fixed list of operators that graphs of models
    contain.
    """
    schema = target._schema
    name = schema.name.removeprefix("aten::")
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "it writes to its arguments"
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return "it does not compute a tensor"
    odd = [a.name for a in schema.arguments if not _PLAIN_ARGUMENTS.fullmatch(str(a.type))]
    if odd:
        return f"its argument {odd[0]!r} is neither a tensor nor a number"
    creates = not any("Tensor" in str(argument.type) for argument in schema.arguments)
    words = [a.name for a in schema.arguments if "str" in str(a.type)]
    if words and (creates or any(_FILE_ARGUMENT.search(word) for word in words)):
        return f"its argument {words[0]!r} can name a file or a setting"
    if name.startswith("_") and not name.startswith("__") and name not in _PRIVATE:
        return "it is a private operator of torch"
    return ""
