"""Factor rules of normalisations: dims that are averaged over stay whole; the other dims may be sharded."""

from __future__ import annotations

from torch import fx

from passes.rules.algebra import (
    NAMES,
    Dims,
    Local,
    OpFactors,
    argument,
    as_dim,
    each,
    everything_whole,
    named,
    operands_of,
    results_of,
    shape,
)
from passes.rules.registry import family


@family("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(node: fx.Node) -> OpFactors:
    """The last dims, which are normalised over, are whole; in returned statistics they have size 1."""
    x, *affine = operands_of(node)
    names = NAMES[: len(shape(x))]
    count = len(argument(node, "normalized_shape"))
    last = names[len(names) - count :]
    results = [names for _ in results_of(node)]
    return named(node, [names, *(last for _ in affine)], results, whole=frozenset(last))


@family("group_norm")
def group_norm(node: fx.Node) -> OpFactors:
    """The channel dim has the factors (g c): each of g groups is normalised over its c channels and all positions, so
    samples and groups may be sharded."""
    x, *affine = operands_of(node)
    groups = argument(node, "num_groups")
    channels = ("g", "c")
    operand: Dims = (("b",), channels, *((n,) for n in NAMES[: len(shape(x)) - 2]))
    sizes = {"b": shape(x)[0], "g": groups, "c": shape(x)[1] // groups, **dict(zip(NAMES, shape(x)[2:], strict=False))}
    whole = frozenset(("c", *NAMES[: len(shape(x)) - 2]))
    return OpFactors(sizes, (operand, *((channels,) for _ in affine)), (operand,), whole, local=_local_group_norm)


def _local_group_norm(local: Local) -> fx.Node:
    return local.copy(num_groups=local.size("g"))


@family("native_group_norm")
def native_group_norm(node: fx.Node) -> OpFactors:
    """Group normalisation with explicit sizes, which also returns mean and rstd per sample and group: samples and
    groups may be sharded, as in :func:`group_norm`."""
    x, *affine = operands_of(node)
    groups = argument(node, "group")
    channels = ("g", "c")
    operand: Dims = (("b",), channels, *((n,) for n in NAMES[: len(shape(x)) - 2]))
    sizes = {"b": shape(x)[0], "g": groups, "c": shape(x)[1] // groups, **dict(zip(NAMES, shape(x)[2:], strict=False))}
    whole = frozenset(("c", *NAMES[: len(shape(x)) - 2]))
    statistics: Dims = (("b",), ("g",))
    results = (operand, statistics, statistics)
    return OpFactors(sizes, (operand, *((channels,) for _ in affine)), results, whole, local=_local_native_group_norm)


def _local_native_group_norm(local: Local) -> fx.Node:
    samples, groups = local.size("b"), local.size("g")
    return local.copy(N=samples, C=groups * local.size("c"), group=groups)


@family(
    "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_with_update_functional",
)  # fmt: skip
def batch_norm(node: fx.Node) -> OpFactors:
    """Channels may be sharded. Samples and positions may be sharded only outside of training, where running statistics
    are used; in training the statistics are computed over them."""
    x, *channelwise = operands_of(node)
    if len(shape(x)) < 2:
        return everything_whole(node)
    names: list[str | None] = ["b", "c", *NAMES[: len(shape(x)) - 2]]
    training = argument(node, "training", "no_training" not in str(node.target))
    patterns = [names if r.dim() == len(names) else _statistics(r.shape) for r in results_of(node)]
    whole = frozenset(n for n in names if n != "c" and n) if training else frozenset()
    return named(node, [names, *(["c"] for _ in channelwise)], patterns, whole=whole)


def _statistics(size: tuple[int, ...]) -> list[str | None]:
    """Factors of a statistics tensor: one element per channel, or no factor for an empty tensor."""
    return ["c" if s else None for s in size]


@family("_weight_norm", "_weight_norm_interface")
def weight_norm(node: fx.Node) -> OpFactors:
    """Direction times length per index of the argument ``dim``: that dim may be sharded; the other dims are whole."""
    directions, _ = operands_of(node)
    names = NAMES[: len(shape(directions))]
    dim = as_dim(argument(node, "dim"), len(names))
    lengths = [n if d == dim else None for d, n in enumerate(names)]
    whole = frozenset(n for d, n in enumerate(names) if d != dim)
    single = len(results_of(node)) == 1  # the norms beside it are not linear in the lengths
    return named(node, [names, lengths], [names, lengths][: len(results_of(node))], whole=whole,
                 linear=each(1) if single else ())  # fmt: skip


@family("instance_norm")
def instance_norm(node: fx.Node) -> OpFactors:
    """Each channel of each sample is normalised over its positions: samples and channels may be sharded."""
    x, *channelwise = operands_of(node)
    places = NAMES[: len(shape(x)) - 2]
    whole = frozenset(places) if argument(node, "use_input_stats") else frozenset()
    running = isinstance(argument(node, "running_mean"), fx.Node)
    if running and argument(node, "use_input_stats"):
        whole |= {"b"}  # running statistics average over the samples
    names = ["b", "c", *places]
    return named(node, [names, *(["c"] for _ in channelwise)], [names], whole=whole)
