"""One architecture of the zoo on some meshes: exported, planned, verified in float64, and what was seen."""

from __future__ import annotations

import functools
import logging
import math
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks.zoo_attention import FusedCalls, fused, masks_of
from benchmarks.zoo_models import Sample, ZooError, build, without_labels
from partitioner import Constraints, Topology, partition
from partitioner.passes.errors import PartitionError
from partitioner.passes.ir.model import Captured
from partitioner.passes.normalize.pipeline import normalize
from partitioner.plans.reference import Reference, run_reference
from partitioner.plans.verify import TOLERANCE, compare
from partitioner.runtime.launch.local import run_threads
from partitioner.solve.evaluate import prepared_model
from partitioner.solve.search import search

Mesh = tuple[int, int, int]  # ranks of pp, dp, tp
_GROUPED = torch.ops.aten._grouped_mm.default


def results(name: str, meshes: list[Mesh]) -> Iterator[dict[str, Any]]:
    """A result per mesh: ``status``, ``reason``, and for what was planned its errors, shares and masks.

    The model is built, captured and run by itself once for all meshes; the first mesh's seconds have that in them.
    """
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    start = time.process_time()
    try:
        sample = build(name)
    except ZooError as error:
        for mesh in meshes:
            yield _result(name, mesh, start, status="unbuilt", reason=f"{error.step}: {error}")
        return
    subject = _Subject(sample)
    for i, mesh in enumerate(meshes):
        found = _examine(subject, mesh)
        if found["status"] == "unexported" and "labels" in subject.sample.inputs:
            note = found["export"]
            subject = _Subject(without_labels(sample), f"without labels: {note}")  # only the loss may not export
            found = _examine(subject, mesh)
        if found["status"] == "unexported":
            for other in meshes[i:]:
                yield _result(name, other, start, **found)
            return
        yield _result(name, mesh, start, **found)
        start = time.process_time()


class _Subject:
    """A model under examination, and what is the same for all meshes."""

    def __init__(self, sample: Sample, note: str = "") -> None:
        self.sample = sample
        self.seen: dict[str, Any] = {"note": note} if note else {}
        self.prepared = prepared_model.prepare(sample.model, sample.inputs, loss=sample.loss)

    @functools.cached_property
    def reference(self) -> Reference:
        with FusedCalls() as calls:
            found = run_reference(self.sample.model, self.sample.inputs, self.sample.loss)
        self.seen["fused_by_model"] = calls.number
        return found

    def normalize(self, captured: Captured) -> Captured:
        """The pass, and what it shows of the model."""
        normal = normalize(captured)
        buffers = dict(self.sample.model.named_buffers())
        grouped = any(n.target is _GROUPED for n in normal.graph.nodes)
        self.seen.update(masks=masks_of(normal, buffers), fused=fused(normal), grouped=grouped)
        return normal


def _examine(subject: _Subject, mesh: Mesh) -> dict[str, Any]:
    try:
        return _plan_and_verify(subject, mesh) | subject.seen
    except PartitionError as error:
        found = dict(status="refused", reason=f"{type(error).__name__}: {_line(error)}")
        return found | _refusal(subject.sample, error) | subject.seen
    except Exception as error:
        return dict(status="crashed", reason=f"{type(error).__name__}: {_line(error)}", trace=_frames(error))


def _result(name: str, mesh: Mesh, start: float, **found: Any) -> dict[str, Any]:
    return dict(name=name, mesh=list(mesh), seconds=round(time.process_time() - start, 2), **found)


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


def _plan_and_verify(subject: _Subject, mesh: Mesh) -> dict[str, Any]:
    pp, dp, tp = mesh
    with (  # what others would plan is not looked for
        mock.patch.object(prepared_model, "normalize", subject.normalize),
        mock.patch.object(search, "list_standard_layouts", return_value=[]),
        mock.patch.object(search, "compare_standard_layouts", return_value=()),
    ):
        pinned = Constraints(pp=pp, dp=dp, tp=tp, zero=0, schedule="1f1b")
        plan = partition(subject.prepared, Topology.local(math.prod(mesh)), constraints=pinned)
    # As plan.verify() does.
    run = run_threads(plan.program, subject.sample.model, subject.sample.inputs, precision="fp64")
    errors = compare(run, subject.reference, plan.program)
    wrong = sorted((item for item in errors.items() if not item[1] <= TOLERANCE), key=lambda item: -item[1])
    return dict(
        status="unequal" if wrong else "equal",
        reason=", ".join(f"{k} {v:.1e}" for k, v in wrong[:3]),
        errors=_by_part(errors),
        share=plan.shares.matmul_sharded,
        without_rule=plan.shares.without_rule,
    )


def _by_part(errors: Mapping[str, float]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for name, error in errors.items():
        part = {"output": "outputs", "loss": "loss", "grad": "gradients", "buffer": "buffers"}[name.split(" ")[0]]
        parts[part] = max(parts.get(part, 0.0), error)
    return parts
