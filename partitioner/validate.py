"""Check the arguments of ``partition`` before anything is traced or solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from partitioner.constraints import Constraints
from partitioner.errors import ConstraintError
from partitioner.execution_profile import OURS, ExecutionProfile
from partitioner.optimizers import optimizer_bytes
from partitioner.passes.errors import InputsError
from partitioner.topology import Topology
from partitioner.topology.files import with_margin
from partitioner.topology.hosts import has_disks

if TYPE_CHECKING:
    from partitioner.passes.ir.model import FoldedModel

OBJECTIVES = ("train", "infer")

_SHOWN = 3  # leaves of a result that a message lists
_AROUND = {"fp8": "bf16", "nvfp4": "bf16", "tf32": "fp32"}  # precision of products -> dtype of the other operators
_PRECISIONS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "torch.float64": "fp64"}


def check_request(
    topology: Any,
    constraints: Constraints,
    optimizer: str,
    train: bool = True,
    profile: ExecutionProfile = OURS,
    precision: str | None = None,
) -> None:
    """Raise a :class:`partitioner.passes.errors.PartitionError` if an argument of ``partition`` is invalid whatever the
    model is. ``topology``: the cluster. ``constraints``: the choices that the user fixed. ``optimizer``: name, such as
    ``"adamw"``. ``train``: whether the plan is for training. ``profile``: the framework that is to execute the plan.
    ``precision``: such as ``"bf16"``; ``None``: that of the parameters.
    """
    check_topology(topology)
    if not isinstance(constraints, Constraints):
        raise ConstraintError(f"constraints must be Constraints(...), got {type(constraints).__name__}")
    optimizer_bytes(1, 4, optimizer)
    constraints.check_idle()
    if profile.expert_tensor == "one_or_tp":
        constraints.check_expert_tensor()
    constraints.check_coupling()
    constraints.check_world(topology.num_devices)
    constraints.check_offload()
    constraints.check_reduction(topology.num_nodes, train)
    if not train and constraints.recompute not in (None, "none"):
        raise ConstraintError(
            f"recompute={constraints.recompute} is given, but the plan is for inference, which has no backward; leave "
            "it out"
        )
    if constraints.offload and None in topology.different_host_shares:
        raise ConstraintError(
            f"offload={'+'.join(constraints.offload)}, but {topology.name} does not describe the hosts of its nodes; "
            "add a host to each group of nodes, like host: dgx-h100 or host: {memory: 2 TB, bandwidth: 55 GB/s}"
        )
    if constraints.offload and "disk" in constraints.offload and not has_disks(topology):
        raise ConstraintError(
            f"offload={'+'.join(constraints.offload)}, but {topology.name} does not describe the disks of its nodes; "
            "add a disk to the host of each group of nodes, like disk: 30 TB, disk_bandwidth: 20 GB/s"
        )
    check_precision(topology, precision, constraints.fp8_scaling)


def check_topology(topology: object) -> None:
    """Raise :class:`InputsError` if ``topology``, an argument of ``partition``, is not a :class:`Topology`."""
    if not isinstance(topology, Topology):
        raise InputsError(
            f"topology must be a Topology, got {type(topology).__name__}: write Topology.local(4), "
            'Topology.preset("dgx-h100", nodes=2) or Topology.load("cluster.yaml")'
        )


_PEAKS = {"fp8": ("h100-sxm", "1979 TFLOP/s"), "nvfp4": ("b200", "9000 TFLOP/s")}  # a device that has it, and its rate


def _check_devices(topology: Topology, precision: str, lacking: Sequence[str]) -> None:
    """Raise :class:`InputsError` if ``lacking`` is not empty. ``lacking``: the kinds of devices of ``topology`` that
    cannot compute matrix products in ``precision``, which is ``"fp8"`` or ``"nvfp4"``."""
    if not lacking:
        return
    others = '"bf16" or "fp16"'
    if precision == "nvfp4" and all(topology.types[kind].has_fp8 for kind in lacking):
        others = '"fp8"'
    device, rate = _PEAKS[precision]
    raise InputsError(
        f'precision="{precision}", but {" and ".join(lacking)} of {topology.name} cannot compute matrix products in '
        f"{precision}: expected {precision} in the peak of every kind of device, as of {device}; {lacking[0]} lists "
        f"{', '.join(topology.types[lacking[0]].peak)}; plan with precision={others}; if the devices do support "
        f"{precision}, give its rate in the topology, like peak: {{{precision}: {rate}}}"
    )


def check_precision(topology: Topology, precision: str | None, fp8_scaling: str = "tensor") -> None:
    """Raise :class:`InputsError` if ``precision`` is ``"fp8"`` or ``"nvfp4"`` and a device of ``topology`` cannot
    compute matrix products in it. ``fp8_scaling``: the elements that share a scale in fp8: all of a ``tensor``, a
    ``row`` or a ``block``. Raise :class:`ConstraintError` if it is not ``tensor`` and ``precision`` is not ``"fp8"``,
    or if it is ``block`` and a device cannot multiply in MXFP8."""
    if precision != "fp8" and fp8_scaling != "tensor":
        raise ConstraintError(
            f"fp8_scaling={fp8_scaling!r} without precision='fp8': no product is in fp8; expected precision='fp8', or "
            "no fp8_scaling"
        )
    kinds = sorted({k for k, _ in topology.paces[0]})
    if precision == "fp8":
        _check_devices(topology, precision, [k for k in kinds if not topology.types[k].has_fp8])
    if precision == "nvfp4":
        _check_devices(topology, precision, [k for k in kinds if not topology.types[k].has_nvfp4])
    lacking = [k for k in kinds if not topology.types[k].has_mxfp8]
    if fp8_scaling == "block" and lacking:
        raise ConstraintError(
            f"fp8_scaling='block', but {' and '.join(lacking)} of {topology.name} cannot multiply in MXFP8: expected "
            "mxfp8 in the peak of every kind of device, as of b200; plan with fp8_scaling='row' or 'tensor'"
        )


def check_options(time_limit_s: Any, progress: Any) -> None:
    """Raise :class:`InputsError` if ``time_limit_s`` (seconds) is not a positive number or ``progress`` cannot be
    called. ``None`` is allowed for both."""
    check_seconds("time_limit_s", time_limit_s)
    check_callback("progress", progress)


def check_seconds(name: str, seconds: Any) -> None:
    """Raise :class:`InputsError` unless ``seconds`` is a positive number or ``None``. ``name``: name of the argument,
    for the message."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:  # nan is not
        raise InputsError(f"{name} must be a positive number of seconds, or None; got {seconds!r}")


def check_callback(name: str, function: Any) -> None:
    """Raise :class:`InputsError` unless ``function`` is callable or ``None``. ``name``: name of the argument, for the
    message."""
    if function is not None and not callable(function):
        raise InputsError(f"{name} must be a function, or None; got {type(function).__name__}")


def check_work(model: FoldedModel, train: bool) -> None:
    """Raise :class:`InputsError` if the model lacks what a step needs. ``train``: whether the step trains, which needs
    a loss and parameters that require gradients; otherwise it needs an output tensor or a changed buffer."""
    if not train:
        if not model.updates and all(output.value is None for output in model.outputs):
            raise InputsError(
                "the model computes nothing: its output has no tensor, and it changes no buffer; expected a forward "
                "that returns tensors"
            )
        return
    if model.loss is None:
        whole = [model.values[o.value].dtype for o in model.outputs if o.value and not model.values[o.value].shape]
        if whole and len(model.outputs) == 1 and not whole[0].is_floating_point:
            raise InputsError(
                f"training needs a loss that has a gradient: the model returns a scalar of {whole[0]}; expected a "
                "floating-point scalar, computed without comparisons, argmax and casts to whole numbers"
            )
        raise InputsError(
            "training needs a loss: the model's output is no scalar and has no `loss`; "
            f"it has {_output_text(model)}; pass labels among the inputs, loss=callable(output) -> scalar "
            f'(as in loss=lambda output: {_loss_example(model)}), or objective="infer"'
        )
    if not any(state.requires_grad for state in model.states.values()):
        count = sum(state.kind == "parameter" for state in model.states.values())
        raise InputsError(
            f"training needs parameters that the loss depends on: none of {count} requires a gradient and "
            "affects the loss; look for requires_grad_(False), detach() and torch.no_grad(), or give "
            'objective="infer"'
        )


def _output_text(model: FoldedModel) -> str:
    """Return the paths and shapes of the first three tensors of the output of ``model`` as text, such as ``0: (), 1:
    (8, 5)``, and the number of further ones; ``"no tensor"`` if there are none."""
    leaves = [f"{o.path or 'a tensor'}: {tuple(model.values[o.value].shape)}" for o in model.outputs if o.value]
    more = f" and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
    return ", ".join(leaves[:_SHOWN]) + more if leaves else "no tensor"


def _loss_example(model: FoldedModel) -> str:
    """Return an expression for a loss of the output of ``model``, as an example in a message: its first real scalar,
    such as ``output[1]``, or a mean of its first tensor, such as ``output["logits"].mean()``."""
    leaves = [(output.path, model.values[output.value]) for output in model.outputs if output.value]
    scalars = [path for path, value in leaves if not value.shape and value.dtype.is_floating_point]
    path = next(iter([*scalars, *(path for path, _ in leaves)]), "")
    keys = [f"[{key}]" if key.isdecimal() else f'["{key}"]' for key in path.split(".") if key]
    return f"output{''.join(keys)}{'' if scalars else '.mean()'}"


def type_of(precision: str | None) -> str | None:
    """Return the number format of parameters and activations for the ``precision`` that the user requested. ``fp8``,
    ``nvfp4`` and ``tf32`` concern only matrix products: they give ``bf16``, ``bf16`` and ``fp32``. Anything else, also
    ``None``, is returned unchanged."""
    return _AROUND.get(precision, precision) if precision else precision


def rate_cluster(topology: Topology, precision: str, margin: float = 0.0) -> Topology:
    """Return a copy of ``topology`` for planning: if ``precision`` is ``"tf32"``, float32 products run at the rate of
    TF32; the fraction ``margin`` (0 to 1) of each device's memory is kept free."""
    return with_margin(topology.in_tf32 if precision == "tf32" else topology, margin)


def precision_of(model: FoldedModel, asked: str | None = None) -> str:
    """Return the precision in which ``model`` is planned. If ``asked``, the user's request, is ``fp8``, ``nvfp4`` or
    ``tf32``, return it. Otherwise return the precision of most elements of the parameters and buffers, such as
    ``bf16``; if no parameter or buffer is floating-point, return ``fp32``."""
    if asked in _AROUND:
        return asked
    sizes: Counter[str] = Counter()
    for state in model.states.values():
        if str(state.spec.dtype) in _PRECISIONS:
            sizes[str(state.spec.dtype)] += state.spec.numel
    return _PRECISIONS[sizes.most_common(1)[0][0]] if sizes else "fp32"


def profile_of(
    profile: ExecutionProfile | str | None, constraints: Constraints | None, topology: Topology
) -> ExecutionProfile:
    """Return the execution profile that the argument ``profile`` of ``partition`` stands for. If it is the runtime of
    this project, ``constraints`` and the devices of ``topology`` decide whether a compiler merges operators, CUDA
    graphs are recorded, and collectives over ``tp`` run in pieces to overlap with matrix products. Raise
    :class:`ConstraintError` for an unknown profile, and :class:`InputsError` if ``topology`` is no :class:`Topology`.
    """
    check_topology(topology)
    found = ExecutionProfile.resolve(profile)
    given = constraints if isinstance(constraints, Constraints) else Constraints()
    return found.executed(given.execution, torch_device(topology), given.overlap_tensor, given.fp8_scaling)


def torch_device(topology: Topology) -> str:
    """Return PyTorch's device type for the cluster ``topology``: ``cpu`` if all devices are CPUs, else ``cuda``."""
    return "cpu" if all(topology.types[kind].torch == "cpu" for kind, _ in topology.paces[0]) else "cuda"
