"""The ``training_step`` and ``validation_step`` of a LightningModule as one model to plan: its loss, and the values
that it logs.

A step is code around the model: it calls submodules, computes a loss, and calls ``self.log``. :class:`StepModel` is a
module with the parameters of the LightningModule. Its forward runs the step on a view of the LightningModule, which
records the logged values. A plan is the same for all batches, so a step may depend only on the batch and the weights:
reading the index of the batch, the step counter or the trainer raises :class:`TrainerError`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from partitioner.trainers.arguments import TrainerError

LOSS, LOGGED, RETURNED = "loss", "logged", "returned"  # entries of what the model returns
TRAINING, VALIDATION = "training_step", "validation_step"
_OF_ONE_BATCH = """
    trainer fabric global_step local_step current_epoch global_rank local_rank logger loggers on_gpu example_input_array
    """.split()
_METHODS = """
    optimizers lr_schedulers manual_backward all_gather clip_gradients toggle_optimizer
    untoggle_optimizer save_hyperparameters
    """.split()


@dataclass
class StepRecords:
    """Records of what ``training_step`` and ``validation_step`` of a LightningModule log and return: names and options,
    but no tensors.

    ``logged``: name of the step -> name of the logged value -> the arguments of ``self.log`` besides name and value,
    such as ``prog_bar``. ``returned``: name of the step -> names of the entries of the returned dict other than the
    loss; ``None`` if there are none.
    """

    logged: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    returned: dict[str, tuple[str, ...] | None] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepRecords:
        """Return this object itself, not a copy. The model is copied before it is traced, and the copy then records in
        the same object. ``memo``: not used."""
        return self


class StepModel(nn.Module):
    """A model whose forward is the step of ``module``, a LightningModule: ``training_step`` in training mode, else
    ``validation_step``.

    It has the parameters, buffers and submodules of ``module``, under the same names. Its forward takes ``batch`` and
    returns a dict: ``loss``, a scalar; ``logged``, a dict name -> scalar of the values that the step logs;
    ``returned``, a dict name -> scalar of the other values that the step returns. ``records``: an object in which each
    forward stores data other than tensors: the further arguments of ``self.log``, and the names of returned values.
    """

    def __init__(self, module: nn.Module, records: StepRecords) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._view: list[Any] = [_make_view(module)]  # in a list: it is no submodule
        self._records = records
        self.training = module.training

    def forward(self, batch: Any) -> dict[str, Any]:
        """Run ``training_step`` (in training mode) or ``validation_step`` of the LightningModule on ``batch``. Return a
        dict with the scalar ``loss``, the scalars that the step logs (``logged``), and the other scalars that it
        returns (``returned``); ``loss`` and ``returned`` are left out if there are none. Raise :class:`TrainerError` if
        the step changes attributes or returns something that is not a scalar, or if ``training_step`` returns no loss.
        """
        view, records = self._view[0], self._records
        name = TRAINING if self.training else VALIDATION
        view.__dict__["training"] = self.training
        logged: dict[str, Any] = {}
        records.logged[name] = {}
        view.__dict__["_logged"], view.__dict__["_record"] = logged, records.logged[name]
        before = _snapshot(view)
        returned = getattr(view, name)(batch, BatchIndex(name))
        _check_unchanged(name, before, _snapshot(view))
        found: dict[str, Any] = {LOGGED: logged}
        if name == TRAINING:
            _check_returned(returned)
        rest = {}
        if isinstance(returned, Mapping):
            rest = {
                key: _read_scalar(value, f"{name} returns {key!r},") for key, value in returned.items() if key != LOSS
            }
            returned = returned.get(LOSS)
        if returned is not None:
            found[LOSS] = _read_scalar(returned, f"the loss of {name} is")
        records.returned[name] = tuple(rest) if rest else None
        if rest:
            found[RETURNED] = rest
        return found


class BatchIndex:
    """Takes the place of the batch index, an argument of ``training_step``, while the step is traced. It has no value:
    any computation with it raises :class:`TrainerError`."""

    def __init__(self, step: str) -> None:
        self.step = step

    def _refuse(self, *_: Any) -> NoReturn:
        raise TrainerError(
            f"{self.step} reads the index of the batch: expected steps that do not depend on the index, because they "
            "are traced once; move code that depends on it into a hook, such as on_train_batch_end"
        )


for _name in """
    add radd sub rsub mul rmul mod rmod floordiv rfloordiv truediv rtruediv divmod rdivmod pow rpow neg pos abs eq ne lt
    le gt ge bool int float index hash str format and rand or ror xor rxor
    """.split():
    setattr(BatchIndex, f"__{_name}__", BatchIndex._refuse)


def _make_view(module: nn.Module) -> nn.Module:
    """Return an object that stands for the LightningModule ``module`` while its step is traced. It has the attributes
    of ``module``, but ``self.log`` records values instead of logging them, and attributes that differ from step to
    step, such as ``trainer`` and ``global_step``, raise :class:`TrainerError`."""
    kind = type(module)
    refused: dict[str, Any] = {name: property(_refuse_attribute(name)) for name in _OF_ONE_BATCH if hasattr(kind, name)}
    refused |= {name: _refuse_attribute(f"{name}()") for name in _METHODS if hasattr(kind, name)}
    view = copy.copy(module)
    view.__class__ = type(kind.__name__, (kind,), refused | {"log": _record_log, "log_dict": _record_log_dict})
    view.__dict__["_trainer"] = None
    return view


def _snapshot(view: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity and the size of each attribute of ``view`` as a dict: name -> (``id()``, length). ``view``:
    an object that stands for a LightningModule. The size is 0 for attributes without a length. A later result that
    differs shows that the step has changed an attribute."""
    own = {k: v for k, v in vars(view).items() if k not in ("_logged", "_record")}
    return {name: (id(value), len(value) if isinstance(value, Sized) else 0) for name, value in own.items()}


def _check_unchanged(step: str, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    """Raise :class:`TrainerError` if the method ``step`` changed an attribute of the LightningModule while it was
    traced, since a plan would not repeat the change in each step. ``before``, ``after``: identity and size of the
    attributes by name, before and after the call."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise TrainerError(
            f"{step} changes self.{changed[0]}: expected steps that do not change attributes, because they are traced "
            "once; return scalars, or log them"
        )


def _refuse_attribute(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TrainerError(
            f"training_step or validation_step uses self.{name}: expected steps that depend only on the batch and the "
            "weights, because they are traced once; move this into a hook, such as on_train_batch_end"
        )

    return refuse


def _record_log(self: Any, name: str, value: Any, *given: Any, **options: Any) -> None:
    """Record the arguments of a call of ``self.log`` in a step that is traced, instead of logging them: the scalar
    ``value`` under ``name``, with the further arguments in ``options``. Raise :class:`TrainerError` for positional
    arguments after the value (``given``).
    """
    if given:
        raise TrainerError(
            f"self.log({name!r}, ...) has positional arguments after the value: expected keyword arguments, as "
            "prog_bar=True"
        )
    self.__dict__["_logged"][name] = _read_scalar(value, f"self.log({name!r}, ...) is given")
    self.__dict__["_record"][name] = options


def _record_log_dict(self: Any, dictionary: Mapping[str, Any], *given: Any, **options: Any) -> None:
    """Record the arguments of a call of ``self.log_dict`` in a step that is traced, instead of logging them.
    ``dictionary``: name -> scalar to log. ``given``, ``options``: the further arguments of the call."""
    for name, value in dictionary.items():
        _record_log(self, name, value, *given, **options)


def _read_scalar(value: Any, what: str) -> Any:
    """Return ``value``, a number or a tensor with one element, as a number or a 0-dimensional tensor.

    ``what``: name of the value, for the start of the error message. Raise :class:`TrainerError` for other values, such
    as metric objects, which keep a state between batches.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, int | float):
        return value
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TrainerError(
        f"{what} {got}; expected a number or a tensor with one element, which is the same on all ranks: reduce it, "
        "as by mean(); compute metrics with a state in a hook, or after training"
    )


def _check_returned(returned: Any) -> None:
    """Raise :class:`TrainerError` unless ``returned``, the result of ``training_step``, is a loss or a dict with a
    loss."""
    if returned is None or (isinstance(returned, Mapping) and returned.get(LOSS) is None):
        raise TrainerError(
            "training_step returns no loss: expected a scalar tensor, or a dict with the key 'loss', for every batch"
        )
