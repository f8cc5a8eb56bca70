"""One architecture of the zoo on some meshes: exported, planned, verified in float64, and what was seen."""

from __future__ import annotations

import logging
import math
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from torch import fx

from benchmarks.zoo_models import Sample, ZooError, build
from partitioner import Constraints, Topology, api, partition
from passes.assemble import Captured
from passes.constants import Evaluator
from passes.errors import PartitionError
from passes.normalize import normalize

Mesh = tuple[int, int, int]  # ranks of pp, dp, tp
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_GROUPED = torch.ops.aten._grouped_mm.default


def examine(name: str, meshes: list[Mesh], connection: Connection) -> None:
    """Send one result for every mesh; the first sends what ends the rest, too."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for result in results(name, meshes):
        connection.send(result)
    connection.send(None)


def results(name: str, meshes: list[Mesh]) -> Iterator[dict[str, Any]]:
    """A result per mesh: ``status``, ``reason``, and for what was planned its errors, shares and masks."""
    start = time.perf_counter()
    try:
        sample = build(name)
    except ZooError as error:
        for mesh in meshes:
            yield _result(name, mesh, start, status="unbuilt", reason=f"{error.step}: {error}")
        return
    for mesh in meshes:
        start = time.perf_counter()
        try:
            found = _plan_and_verify(sample, mesh)
        except PartitionError as error:
            found = dict(status="refused", reason=f"{type(error).__name__}: {_line(error)}") | _refusal(sample, error)
        except Exception as error:
            found = dict(status="crashed", reason=f"{type(error).__name__}: {_line(error)}", trace=_frames(error))
        yield _result(name, mesh, start, **found)


def _result(name: str, mesh: Mesh, start: float, **found: Any) -> dict[str, Any]:
    return dict(name=name, mesh=list(mesh), seconds=round(time.perf_counter() - start, 2), **found)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames))


def _refusal(sample: Sample, error: PartitionError) -> dict[str, Any]:
    """Whether torch.export itself refuses, without us; and our own frames."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.export.export(sample.model, (), sample.inputs, strict=False)
    except Exception as own:
        return dict(status="unexported", export=f"{type(own).__name__}: {_line(own)[:300]}")
    return dict(trace=_frames(error.__cause__ or error))


def _plan_and_verify(sample: Sample, mesh: Mesh) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def noted(captured: Captured) -> Captured:
        normal = normalize(captured)
        seen.update(masks=_masks(normal), grouped=any(n.target is _GROUPED for n in normal.graph.nodes))
        return normal

    pp, dp, tp = mesh
    constraints = Constraints(pp=pp, dp=dp, tp=tp)
    with mock.patch.object(api, "normalize", noted):
        plan = partition(
            sample.model, Topology.local(math.prod(mesh)), sample.inputs, loss=sample.loss, constraints=constraints
        )
    report = plan.verify(sample.model, sample.inputs, sample.loss)
    errors = _by_part(report.errors)
    worst = sorted(report.errors.items(), key=lambda item: -item[1])[:3]
    return dict(
        status="equal" if report.ok else "unequal",
        reason="" if report.ok else ", ".join(f"{k} {v:.1e}" for k, v in worst),
        errors=errors,
        share=plan.shares.matmul_sharded,
        without_rule=plan.shares.without_rule,
        **seen,
    )


def _by_part(errors: Mapping[str, float]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for name, error in errors.items():
        part = {"output": "outputs", "loss": "loss", "grad": "gradients"}[name.split(" ")[0]]
        parts[part] = max(parts.get(part, 0.0), error)
    return parts


def _masks(captured: Captured) -> dict[str, int]:
    """How attention is masked: ``none``, ``causal``, by ``constant`` masks or by ``computed`` ones."""
    constants = {
        p: captured.constants[s] for p, s in captured.placeholders.items() if captured.states.get(s) is not None
        and captured.states[s].kind == "constant"
    }  # fmt: skip
    evaluator = Evaluator(constants)
    found: dict[str, int] = {}
    for node in captured.graph.nodes:
        if node.target is _ATTENTION:
            kind = _mask_of(node, evaluator)
            found[kind] = found.get(kind, 0) + 1
    return found


def _mask_of(node: fx.Node, evaluator: Evaluator) -> str:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    given |= node.kwargs
    mask = given.get("attn_mask")
    if not isinstance(mask, fx.Node):
        return "causal" if given.get("is_causal") else "none"
    return "computed" if _depends(mask) or evaluator.value(mask) is None else "constant"


def _depends(node: fx.Node) -> bool:
    """Whether a node depends on a placeholder that is no constant; constants are read as such by the evaluator."""
    return False
