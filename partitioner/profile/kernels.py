"""The kernels that a profile times: a table of families of kernels, and the sizes of each.

A case describes its kernel without tensors, so that it can be sent to the ranks. :func:`build_case_tensors` creates the
tensors there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from partitioner.cost.call.operators import Kernel

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}
ROW = {"cpu": 256, "cuda": 2048}  # elements along the dim that is reduced, normalised or sorted
_TABLE_ROWS = 4096
_LARGEST = 3  # how many of the largest sizes are timed for AdamW
# bytes of operands that are used in turn: more than the caches hold for one rank
_FOOTPRINT = {"cpu": 48 << 20, "cuda": 256 << 20}
_MAX_COPIES = 128
_ADAM_BYTES = 28  # per fp32 parameter: what partitioner/cost/call/states.py charges an update with


@dataclass(frozen=True)
class KernelCase:
    """A kernel to be timed. ``name``: a key of :data:`FAMILIES`, such as ``mm``. ``precision``: name of the dtype, such
    as ``bf16``. ``shape``: M, N, K of a matrix product; batch, heads, sequence and head size of an attention; the
    number of elements for ``launch``; the number of rows for other kernels (a row has 256 elements on a CPU and 2048 on
    a GPU)."""

    name: str
    shape: tuple[int, ...]
    precision: str = "fp32"

    def __str__(self) -> str:
        """Return the name that reports show, such as ``mm 16x512x1024 fp32``."""
        return f"{self.name} {'x'.join(map(str, self.shape))} {self.precision}"


@dataclass(frozen=True)
class BuiltCase:
    """A kernel with its tensors, ready to be timed. ``run``: the function to time, without arguments. ``kernel``: the
    description by which the cost model predicts its time."""

    run: Callable[[], object]
    kernel: Kernel


def build_case_tensors(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return a function that runs the kernel ``case`` once, with tensors created on ``device``, and the kernel's
    description for the cost model.

    The function uses several copies of the tensors in turn. A copy is therefore no longer in the caches when it is used
    again, as in real programs. Raise ``RuntimeError`` or ``NotImplementedError`` if the device cannot run the kernel.
    """
    first = FAMILIES[case.name](case, device)
    copies = min(_MAX_COPIES, math.ceil(_FOOTPRINT[device.type] / first.kernel.num_bytes))
    if case == LAUNCH or copies == 1:
        return first
    runs = itertools.cycle([first.run, *(FAMILIES[case.name](case, device).run for _ in range(copies - 1))])
    return BuiltCase(lambda: next(runs)(), first.kernel)


class _OperandPool:
    """A pool of random numbers on one device, from which tensors take consecutive parts. The pool is so large that a
    part is no longer in the caches when it is used again. The numbers are generated only once."""

    def __init__(self, device: torch.device) -> None:
        """Generate the random numbers on ``device`` from which tensors are taken."""
        self.numbers = torch.randn(_FOOTPRINT[device.type] // 2, device=device)
        self.next = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of ``shape`` with random numbers: a view of the next part of the pool (one large tensor), or
        a new tensor if it needs more than half of the pool. After the end of the pool, parts are taken from its start
        again."""
        count = math.prod(shape)
        if 2 * count > len(self.numbers):  # otherwise the next operand would be the same numbers
            return torch.randn(shape, device=self.numbers.device)
        start = self.next if self.next + count <= len(self.numbers) else 0
        self.next = start + -(-count // 16) * 16  # parts begin at cache lines
        return self.numbers[start : start + count].view(shape)


_store = cache(_OperandPool)


def _take_random_tensor(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of shape ``shape`` with random numbers on ``device``, converted to ``dtype``."""
    return _store(device).take(shape).to(dtype)


def _build_product(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return the matrix product ``case`` of random tensors on ``device``, ready to be timed: ``mm`` of dense factors,
    ``mm_nt`` with a transposed second factor, or ``mm_tn`` with a transposed first factor. These are the three products
    of a linear layer's forward and backward.
    """
    m, n, k = case.shape
    dtype = DTYPES[case.precision]
    a = _take_random_tensor(*((k, m) if case.name == "mm_tn" else (m, k)), device=device, dtype=dtype)
    b = _take_random_tensor(*((n, k) if case.name == "mm_nt" else (k, n)), device=device, dtype=dtype)
    a, b = (a.t() if case.name == "mm_tn" else a), (b.t() if case.name == "mm_nt" else b)
    num_bytes = (m * k + k * n + m * n) * dtype.itemsize
    kernel = Kernel("matmul", num_bytes, 0.0, 2.0 * m * n * k, float(min(m, n, k)), case.precision)
    if case.precision == "fp8":
        one = torch.ones((), device=device)
        column_major = b.t().contiguous().t()
        scaled = partial(torch._scaled_mm, a, column_major, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return BuiltCase(scaled, kernel)
    if case.precision == "tf32":
        return BuiltCase(partial(_with_tf32, a, b), kernel)
    return BuiltCase(partial(torch.mm, a, b), kernel)


def _with_tf32(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of ``a`` and ``b``, computed with TF32 allowed; restore PyTorch's setting
    afterwards."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return torch.mm(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _build_attention(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return causal attention on random tensors on ``device``, ready to be timed, with its description for the cost
    model. The shape of ``case`` is (batch, heads, sequence, head size)."""
    batch, heads, seq, size = case.shape
    dtype = DTYPES[case.precision]
    query, key, value = (_take_random_tensor(batch, heads, seq, size, device=device, dtype=dtype) for _ in range(3))
    # scores and their product with the values, of which a causal mask leaves half
    flops = 2.0 * batch * heads * (seq * (seq + 1) // 2) * 2 * size
    kernel = Kernel("attention", 4.0 * query.nbytes, 0.0, flops, float(seq), case.precision, width=float(size))
    return BuiltCase(partial(F.scaled_dot_product_attention, query, key, value, is_causal=True), kernel)


def _on_rows(
    kind: str,
    function: Callable[..., object],
    num_operands: int,
    results: float,
    case: KernelCase,
    device: torch.device,
) -> BuiltCase:
    """Return an operator on random tensors of shape ``[rows, 256]`` (CPU) or ``[rows, 2048]`` (GPU) on ``device``,
    ready to be timed; the shape of ``case`` is ``(rows,)``. ``kind``: the kind of kernel for the cost model.
    ``function``: the operator, which gets ``num_operands`` tensors. ``results``: number of result elements for each
    element of one operand.
    """
    (rows,), row, dtype = case.shape, ROW[device.type], DTYPES[case.precision]
    operands = [_take_random_tensor(rows, row, device=device, dtype=dtype) for _ in range(num_operands)]
    num_bytes = dtype.itemsize * rows * row * (num_operands + results)
    return BuiltCase(partial(function, *operands), Kernel(kind, float(num_bytes)))


def _build_launch(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return a kernel on ``device`` with almost no work, ready to be timed, to measure the time of a launch. The shape
    of ``case`` is its number of elements.
    """
    one = torch.ones(case.shape, device=device)
    return BuiltCase(partial(torch.add, one, one), Kernel("pointwise", 3.0 * one.nbytes))


@cache
def _build_embedding_table(device: torch.device) -> Tensor:
    """Return a table of 4096 rows of random numbers on ``device``, for the timing of embeddings."""
    return _take_random_tensor(_TABLE_ROWS, ROW[device.type], device=device)


def _build_embedding(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return an embedding on ``device``, ready to be timed, that looks up random rows of a table. The shape of ``case``
    is the number of rows to look up.
    """
    (rows,) = case.shape
    table = _build_embedding_table(device)
    index = torch.randint(_TABLE_ROWS, (rows,), device=device)
    num_bytes = index.nbytes + 2 * rows * table[0].nbytes
    return BuiltCase(partial(torch.embedding, table, index), Kernel("lookup", float(num_bytes)))


def _build_gather(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return a ``gather`` of random elements within each row of a tensor on ``device``, ready to be timed. The shape of
    ``case`` is the number of rows of this tensor; a row has 256 elements on a CPU and 2048 on a GPU.
    """
    (rows,), row = case.shape, ROW[device.type]
    x, index = _take_random_tensor(rows, row, device=device), torch.randint(row, (rows, row), device=device)
    return BuiltCase(partial(torch.gather, x, 1, index), Kernel("lookup", float(index.nbytes + 2 * x.nbytes)))


def _build_adamw(case: KernelCase, device: torch.device) -> BuiltCase:
    """Return a step of AdamW on one float32 parameter on ``device``, ready to be timed. The shape of ``case`` is the
    number of rows of the parameter; a row has 256 elements on a CPU and 2048 on a GPU.
    """
    (rows,), row = case.shape, ROW[device.type]
    weight = torch.nn.Parameter(_take_random_tensor(rows, row, device=device).clone())
    weight.grad = _take_random_tensor(rows, row, device=device)
    step = torch.optim.AdamW([weight], lr=1e-4, fused=device.type == "cuda").step
    return BuiltCase(step, Kernel("optimizer", float(_ADAM_BYTES * rows * row)))


def _layer_norm(x: Tensor) -> Tensor:
    """Return ``x`` of shape ``[rows, elements]`` normalised in each row to mean 0 and variance 1."""
    return F.layer_norm(x, x.shape[1:])


def _rms_norm(x: Tensor) -> Tensor:
    """Return ``x`` of shape ``[rows, elements]`` with each row divided by its root mean square."""
    return F.rms_norm(x, x.shape[1:])


def _apply_to_last_dim(function: Callable[..., object], x: Tensor) -> object:
    """Return the result of ``function``, an operator such as ``torch.sum``, on the last dim of ``x``."""
    return function(x, -1)


def _transpose_heads(x: Tensor) -> Tensor:
    """Return a copy of ``x``, of shape ``[rows, heads * 64]``, with shape ``[heads, rows, 64]``."""
    made: Tensor = x.unflatten(1, (-1, 64)).transpose(0, 1).contiguous()
    return made


def _multiply_broadcast(x: Tensor) -> Tensor:
    """Return ``x``, of shape ``[rows, elements]``, with each row multiplied elementwise by the first row."""
    return x * x[0]


def _concatenate_pair(x: Tensor, y: Tensor) -> Tensor:
    """Return the rows of ``x`` followed by those of ``y``, both of shape ``[rows, elements]``."""
    return torch.cat((x, y))


_Family = Callable[[KernelCase, torch.device], BuiltCase]

FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("mm", "mm_nt", "mm_tn"), _build_product),
    "attention": _build_attention,
    "launch": _build_launch,
    "add": partial(_on_rows, "pointwise", torch.add, 2, 1),
    "mul": partial(_on_rows, "pointwise", torch.mul, 2, 1),
    "broadcast": partial(_on_rows, "broadcast", _multiply_broadcast, 1, 1),
    "silu": partial(_on_rows, "special", F.silu, 1, 1),
    "exp": partial(_on_rows, "special", torch.exp, 1, 1),
    "sum": partial(_on_rows, "reduction", partial(_apply_to_last_dim, torch.sum), 1, 0.0),
    "mean": partial(_on_rows, "reduction", partial(_apply_to_last_dim, torch.mean), 1, 0.0),
    "softmax": partial(_on_rows, "softmax", partial(_apply_to_last_dim, torch.softmax), 1, 1),
    "log_softmax": partial(_on_rows, "softmax", partial(_apply_to_last_dim, torch.log_softmax), 1, 1),
    "layer_norm": partial(_on_rows, "norm", _layer_norm, 1, 1),
    "rms_norm": partial(_on_rows, "norm", _rms_norm, 1, 1),
    "embedding": _build_embedding,
    "gather": _build_gather,
    "sort": partial(
        _on_rows, "sort", partial(_apply_to_last_dim, torch.sort), 1, 3
    ),  # values, and indices of eight bytes
    "cat": partial(_on_rows, "default", _concatenate_pair, 2, 2),
    "transpose": partial(_on_rows, "default", _transpose_heads, 1, 1),
    "adamw": _build_adamw,
}
# kernels that only move elements, or that programs run in float32, too
_IN_FP32 = ("embedding", "gather", "sort", "adamw")
ON_ROWS = tuple(name for name in FAMILIES if name not in ("mm", "mm_nt", "mm_tn", "attention", "launch"))
LAUNCH = KernelCase("launch", (1,))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the kernels to time on a device. ``knots``: values for the smallest of M, N and K of matrix products.
    ``large``: values for the other two. ``rows``: numbers of rows of other operators. ``attention``: batch, heads,
    sequence, head size of each attention. ``precisions``: names of dtypes; the first is used for all kernels, the
    others only for large matrix products."""

    knots: tuple[int, ...]
    large: tuple[int, ...]
    rows: tuple[int, ...]
    attention: tuple[tuple[int, int, int, int], ...]
    precisions: tuple[str, ...]


SIZES: dict[tuple[str, bool], Sizes] = {  # (type of device, whether to be quick) -> sizes
    ("cpu", True): Sizes((16, 64, 256), (512,), (32, 512, 4096), ((1, 4, 128, 32),), ("fp32", "bf16")),
    ("cpu", False): Sizes(
        (4, 16, 64, 128, 256, 512),
        (512, 1024),
        (16, 64, 256, 1024, 4096, 16384),
        ((1, 8, 64, 32), (2, 4, 128, 64), (1, 8, 512, 64)),
        ("fp32", "bf16", "fp16", "fp64"),
    ),
    ("cuda", True): Sizes(
        (16, 128, 1024, 4096), (4096,), (512, 4096, 32768), ((2, 16, 2048, 128),), ("bf16", "fp16", "fp32")
    ),
    ("cuda", False): Sizes(
        (1, 16, 64, 128, 256, 512, 1024, 2048, 4096),
        (4096, 8192),
        (32, 128, 512, 2048, 8192, 32768),
        ((8, 16, 1024, 64), (2, 16, 4096, 128), (1, 16, 8192, 128)),
        ("bf16", "fp16", "fp32", "tf32", "fp8", "fp64"),
    ),
}


def list_product_cases(sizes: Sizes) -> list[KernelCase]:
    """Return the matrix products to time. In the first precision of ``sizes``, one of M, N and K takes each value of
    ``sizes.knots``, while the other two are equal and take each value of ``sizes.large``. In every other precision, M,
    N and K are all the last of ``sizes.knots``, to measure the peak rate."""
    leading, *others = sizes.precisions
    forms = ("mm", "mm_nt", "mm_tn")
    cases = []
    for knot in sizes.knots:
        for size in sizes.large:
            for place, form in enumerate(forms):
                shape = [size, size, size]
                shape[place] = knot
                cases.append(KernelCase(form, tuple(shape), leading))
    top = sizes.knots[-1]
    return cases + [KernelCase(form, (top, top, top), other) for other in others for form in forms[:2]]


def list_attention_cases(sizes: Sizes) -> list[KernelCase]:
    """Return the attention kernels to time, one for each shape in ``sizes.attention``, in the first of its
    precisions."""
    return [KernelCase("attention", shape, sizes.precisions[0]) for shape in sizes.attention]


def on_rows(sizes: Sizes, names: Iterable[str] = ON_ROWS) -> list[KernelCase]:
    """Return the kernels to time that work on rows of elements, such as softmax: one for each number of rows in
    ``sizes.rows`` (for AdamW, only for the three largest numbers). All are timed in float32. Kernels that programs run
    in the first dtype of ``sizes.precisions`` are also timed in this dtype. ``names``: the kernels, as keys of
    :data:`FAMILIES`."""
    return [
        KernelCase(name, (rows,), precision)
        for name in names
        for precision in dict.fromkeys(("fp32", "fp32" if name in _IN_FP32 else sizes.precisions[0]))
        for rows in (sizes.rows if name != "adamw" else sizes.rows[-_LARGEST:])  # a step updates all parameters at once
    ]
