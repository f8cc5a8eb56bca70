"""Tables and notes of a plan as text, coloured on a terminal: figures, stages, candidates, collectives, rules, memory.

The notes explain the widths of the sequence and expert axes, and the precision of the computation and of stored states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from partitioner.execution_profile import OURS
from partitioner.explain.memory_texts import (
    describe_lack,
    describe_tried_offload,
    disk_text,
    fit_text,
    format_offload,
    host_text,
    usable_memory_text,
)
from partitioner.explain.proof import certificate_text, is_covered, list_main_uncovered_choices
from partitioner.optimizers import OPTIMIZERS
from partitioner.passes.dtypes import get_dtype_itemsize, sum_type
from partitioner.passes.ir.layouts import Layout
from partitioner.passes.products import is_product_name
from partitioner.plan import OPEN, WITHOUT, Baseline, Candidate, Certificate, Plan, StageEstimate
from partitioner.plans.figures import (
    COLLECTIVE_NAMES,
    bubble_text,
    candidate_text,
    fullest_rank,
    list_usable_bytes,
    mesh_text,
    schedule_text,
    share_of_usable,
)
from partitioner.plans.mesh_axes import axis_text, devices_text, level_rates
from partitioner.plans.outline import Outline
from partitioner.runtime.program.mesh import hybrid_mesh
from partitioner.runtime.program.program import Program, StateData
from partitioner.simulate.weight_precision import common_precision
from partitioner.topology import Topology
from partitioner.units import (
    bytes_text,
    count_text,
    format_digits,
    format_percent,
    format_plural,
    format_ranges,
    list_distinct_seconds_texts,
    seconds_text,
)

if TYPE_CHECKING:
    from partitioner.passes.ir.model import FoldedModel
    from partitioner.passes.ops.scaled_products import Scaling

_OTHERS = {"bf16": "fp16", "fp16": "bf16", "fp32": "tf32"}

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_MUCH = 2.0  # a device that is more than this many times as fast in another precision gets a note


def precision_notes(plan: Plan) -> list[str]:
    """Return a note for each type of device in ``plan`` that multiplies more than twice as fast in another data type of
    similar use (bf16 for fp16 and vice versa, tf32 for fp32); empty if there is none.
    """
    precision = plan.precision or (common_precision(plan.written) if plan.written is not None else "")
    other = _OTHERS.get(precision)
    if other is None:
        return []
    notes = []
    for kind in sorted({plan.topology.devices[device].kind for device in plan.devices}):
        device = plan.topology.types[kind]
        times = device.peak_of(other) / device.peak_of(precision)
        if times > _MUCH:
            loss = ", with losses scaled" if other == "fp16" else ""
            notes.append(
                f"{kind} multiplies {format_digits(times, 2)} times as fast in {other} as in {precision}: plan with "
                f'precision="{other}"{loss}, where the model can be trained or used in it'
            )
    return notes


def notes_on_precision(
    topology: Topology,
    precision: str,
    model: FoldedModel,
    scaling: Scaling | None = None,
    program: Program | None = None,
) -> tuple[str, ...]:
    """Return notes for the user, one sentence each. If ``scaling`` is given, they name the products of ``model`` that
    are not in fp8 or NVFP4. If ``precision`` is ``fp32`` on GPUs, a note says that plans ignore the setting
    ``torch.set_float32_matmul_precision`` of this process. ``topology``: the devices that the plan is for. ``scaling``:
    which numbers share a scale in fp8 or NVFP4, or ``None`` if nothing is in them. ``program``: the plan's program
    (instructions and graphs of all ranks), or ``None`` if the plan only has estimates."""
    import torch  # imported late: the report of a plan does not need it

    from partitioner.cost.call.fp8 import notes_on_fp8
    from partitioner.runtime.program.precision import list_fp8_blocks
    from partitioner.validate import torch_device

    if scaling is not None:
        return notes_on_fp8(model, scaling, None if program is None else list_fp8_blocks(program))
    setting = torch.get_float32_matmul_precision()
    if setting == "highest" or precision != "fp32" or torch_device(topology) != "cuda":
        return ()
    return (
        f"torch.set_float32_matmul_precision({setting!r}) is a setting of this process, which plans ignore; "
        'use partition(..., precision="tf32") to plan and run matrix products in TF32',
    )


def types_text(plan: Plan) -> str:
    """Return the data types of products, parameters, gradients and optimizer states of ``plan`` as text; empty if the
    plan has no program (instructions of its ranks), only estimates.
    """
    program = plan.written
    if program is None:
        return ""
    return "; ".join(filter(None, (_product_types(program), *_kept_types(plan, program))))


def _product_types(program: Program) -> str:
    """Return the data types of the results of matrix products in ``program`` (instructions and graphs of all ranks) as
    text, such as ``products in bf16``, the most frequent first; empty if there are no products.
    """
    found: Counter[str] = Counter()
    for node in (node for block in program.blocks.values() for node in block.nodes):
        _, _, name = str(node.get("target", "")).partition(".")
        value: Any = node.get("val") or ()  # shape, dtype and, if transposed, strides of the node's only result
        if node["op"] == "call_function" and is_product_name(name) and len(value) >= 2 and isinstance(value[1], str):
            nvfp4 = node["args"][4:5] == ["nvfp4"]
            found["nvfp4" if nvfp4 else "fp8" if "fp8" in name else _shorten_dtype(value[1])] += 1
    if program.tf32:
        found["tf32 on GPUs"] += found.pop("fp32", 0)
    return f"products in {' and '.join(name for name, _ in found.most_common())}" if found else ""


def _kept_types(plan: Plan, program: Program) -> Iterator[str]:
    """Yield texts such as ``parameters in bf16`` on the data types of what ``plan`` keeps in memory: parameters and, in
    training, gradients, float32 copies of parameters (master copies), and optimizer states. ``program``: the program of
    ``plan``.
    """
    parameters = [state for state in program.states.values() if state.kind == "parameter"]
    trained = [state for state in parameters if state.requires_grad and program.objective == "train"]
    if parameters:
        yield f"parameters in {_types_of(parameters)}"
    if not trained:
        return
    added_up = [_with_type_of_sums(state) for state in trained]
    yield f"gradients in {_types_of(added_up)}"
    optimizer = OPTIMIZERS[plan.optimizer]
    if optimizer.master and added_up != trained:
        yield "master copies of parameters in fp32"
    if optimizer.moment_bytes:
        yield f"states of {plan.optimizer} in {_types_of(added_up)}"


def _with_type_of_sums(state: StateData) -> StateData:
    """Return a copy of the parameter ``state`` with another data type: the type in which its gradients are summed, such
    as float32 for a bfloat16 parameter. The copy describes the gradient of the parameter in a text on data types.
    """
    return state.model_copy(update={"dtype": sum_type(state.dtype)})


def _types_of(states: Sequence[StateData]) -> str:
    """Return the data types of ``states`` (parameters and buffers) as text, such as ``bf16 and fp32``, the type with
    the most elements first."""
    sizes: Counter[str] = Counter()
    for state in states:
        sizes[_shorten_dtype(state.dtype)] += math.prod(state.shape)
    return " and ".join(name for name, _ in sizes.most_common())


def _shorten_dtype(dtype: str) -> str:
    """Return the short name of the data type ``dtype``: ``bf16`` for ``bfloat16``. A type without a short name is
    returned unchanged.
    """
    return _SHORT.get(dtype, dtype)


_FORWARD_HEAD, _BACKWARD_HEAD = ("forward\nper step", True), ("backward\nper step", True)  # titles of columns
STEP_PLACES = 4  # digits of the step times of layouts, which may differ little
_MOST_CANDIDATES = 12

STATUS_WORDS = {
    "chosen": "chosen",
    "solved": "tried: slower",
    OPEN: "not tried, may be faster",  # its lower bound is below the plan's step time
    "bounded": "ruled out by a bound",
    "infeasible": "does not fit in memory",
}
_COUNTED = {  # words in a list of outcomes: for one candidate, for several
    "chosen": ("chosen", "chosen"),
    "solved": ("tried and slower", "tried and slower"),
    OPEN: ("not tried, may be faster", "not tried, may be faster"),
    "bounded": ("ruled out by a lower bound on its time", "ruled out by lower bounds on their time"),
    "infeasible": ("does not fit in memory", "do not fit in memory"),
}
_VARYING = "; layouts with other numbers of communication groups have more or less"
_NO_PLAN = "not possible"  # for another reason than lack of memory
UNCOVERED_MARK = " *"  # after the outcome of a layout that the proof does not cover
_EXECUTION = {  # execution mode -> how ranks execute instructions
    "eager": "",
    "compiled": "compiled between collectives",
    "graph": "one step is recorded, and replayed afterwards",
}
_ENDS = {"time limit": "its time limit", "interruption": "an interruption"}
_SHARED = {  # ZeRO stage -> what ranks share
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "optimizer states, gradients and parameters",
}
_IN_PART = {  # ``Constraints(recompute=...)`` -> what is recomputed instead of whole calls
    "scores": "attention scores",
    "selective": "norms, activation functions and other cheap operators",
    "alternate": "cheap operators and every second matrix product",
}
AS_FAST, _ROUNDING = "as fast as the chosen one", 1e-9
_SAME = 1e-3  # fraction of a step: less is no difference


def is_barred(candidate: Candidate) -> bool:
    """Return whether ``candidate`` has no plan for another reason than a lack of memory, such as a size that does not
    divide. ``candidate``: a layout (mesh, microbatch size, schedule, ZeRO stage) that the search for a plan examined.
    """
    return candidate.status == "infeasible" and candidate.missing is None


def is_as_fast(candidate: Candidate, certificate: Certificate) -> bool:
    """Return whether ``candidate`` was not chosen although its computed step time equals the step time of the chosen
    plan, except for rounding, or is below it. ``candidate``: a layout (mesh, microbatch size, schedule, ZeRO stage)
    that the search examined. ``certificate``: the results of the search.
    """
    solved = candidate.status == "solved" and candidate.step_time is not None
    return solved and (candidate.step_time or 0.0) <= certificate.objective * (1 + _ROUNDING)


def status_word(candidate: Candidate, certificate: Certificate) -> str:
    """Return a short text for what the search found for ``candidate``, such as ``tried: slower``. ``candidate``: a
    layout (mesh, microbatch size, schedule, ZeRO stage) that the search for a plan examined. ``certificate``: the
    results of the search.
    """
    if is_as_fast(candidate, certificate):
        return AS_FAST
    return _NO_PLAN if is_barred(candidate) else STATUS_WORDS[_get_status(candidate, certificate)]


def _get_status(candidate: Candidate, certificate: Certificate) -> str:
    """Return the result of the search for ``candidate`` as one word: ``chosen``, ``solved`` (its step time was
    computed), ``bounded`` (a lower bound on its step time rules it out), ``infeasible`` (there is no plan), or ``open``
    (only a lower bound is known, so that it may be faster than the chosen plan). ``candidate``: a layout (mesh,
    microbatch size, schedule, ZeRO stage) that the search examined. ``certificate``: the results of the search.
    """
    return OPEN if certificate.is_open(candidate) else candidate.status


def describe_tried_rows(certificate: Certificate, bound: str) -> str:
    """Return a note, below a table of layouts, on the layouts that were tried and whose lower bound on the step time is
    below the step time of the chosen plan; empty if there are no such layouts. ``certificate``: the results of the
    search. ``bound``: the title of the column with the lower bounds."""
    if not any(row.status == "solved" and row.bound < certificate.objective for row in certificate.candidates):
        return ""
    return (
        f'"{STATUS_WORDS["solved"]}": the best plan that was found for the row takes longer than the chosen one. Where '
        f'"{bound}" is below the step time of the chosen one, another plan of the row may still be faster.'
    )


def describe_uncovered_rows(certificate: Certificate) -> str:
    """Return a note, below a table of layouts, that explains the mark of layouts that the proof of optimality does not
    cover; empty if it covers all. ``certificate``: the results of the search."""
    if all(is_covered(row, certificate) for row in certificate.candidates):
        return ""
    return f"{UNCOVERED_MARK.strip()} The proof of optimality does not cover these rows."


def format_heading(text: str) -> Text:
    """Return ``text`` in bold, as the heading of a section of a text report."""
    return Text(text, style="bold")


def indent_part(part: RenderableType) -> Padding:
    """Return ``part``, a text or table of the library rich, indented by two characters."""
    return Padding(part, (0, 0, 0, 2), expand=False)


def build_pair_grid(rows: Sequence[tuple[str, str]]) -> Padding:
    """Return a grid of text with two columns and without titles, for a terminal. ``rows``: pairs (name, value)."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, Text(value))
    return indent_part(grid)


def build_empty_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """Return a table with column titles and no rows. ``columns``: (title, whether it holds numbers) of each column;
    numbers are aligned to the right. A title may have several lines.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1))
    for title, numeric in columns:
        made.add_column(
            title,
            justify="right" if numeric else "left",
            no_wrap=numeric,
            min_width=max(map(len, title.split("\n"))),
            overflow="fold",
        )
    return made


def microbatches_text(plan: Plan) -> str:
    """Return the number of microbatches in a step of ``plan`` as text, such as ``8``, or ``5 on 4 ranks of dp, 4 on 3``
    if ranks of the mesh axis ``dp`` have different numbers.
    """
    if not plan.data_shares:
        return f"{plan.num_microbatches:,}"
    (most, ranks), *others = sorted(Counter(plan.data_shares).items(), reverse=True)
    return ", ".join(
        [f"{most:,} on {format_plural(ranks, 'rank')} of dp", *(f"{n:,} on {ranks}" for n, ranks in others)]
    )


def build_figure_grid(plan: Plan, time: str) -> Padding:
    """Return a grid of text, for a terminal, with the names and values of the main numbers of ``plan``, such as step
    time and peak memory. Numbers without a value are left out. ``time``: a text on what the step time is spent on, such
    as ``computation 86%, communication 11%``.
    """
    estimate, certificate = plan.estimate, plan.certificate
    fullest = fullest_rank(plan)
    batch = _find_batch_size(plan)
    samples = ""
    if batch:
        parts = sum(plan.data_shares) or plan.num_microbatches * plan.mesh.get("dp", 1)
        length = f", {plan.tokens_per_step // batch:,} tokens each" if plan.tokens_per_step else ""
        samples = f" of {format_plural(batch // max(1, parts), 'sample')}, global batch {batch:,}{length}"
    rows = [
        ("without host memory", describe_lack(plan) if plan.lacking and plan.offload else ""),
        ("planned, not executed", f"{', '.join(plan.planned_only)}: figures only" if plan.planned_only else ""),
        ("execution profile", plan.profile.name if plan.profile.differences else ""),
        ("mesh", f"{mesh_text(plan.mesh)} ({_describe_ranks(plan)}) on {plan.topology.name}"),
        ("devices", devices_text(plan)),
        ("links", axis_text(plan)),
        ("bandwidth", bandwidth_text(plan)),
        ("microbatches", f"{microbatches_text(plan)}{samples}"),
        ("schedule", schedule_text(plan)),
        ("objective", plan.objective + (f", {plan.optimizer}" if plan.objective == "train" else "")),
        ("precision", precision_text(plan)),
        ("types", types_text(plan)),
        ("sharding", sharing_text(plan)),
        ("recompute", recomputed_text(plan)),
        ("execution", execution_text(plan)),
        ("step time", seconds_text(estimate.step_time)),
        ("of which", time),
        ("throughput", throughput_text(plan)),
        ("fewer devices", fewer_text(plan)),
        ("another batch", other_batch_text(plan)),
        ("with offload", offload_alternative_text(plan)),
        ("MFU", mfu_text(plan)),
        ("bubble", waiting_text(plan)),
        ("memory", fit_text(plan) + (f", rank {fullest} is the fullest" if plan.world_size > 1 else "")),
        ("usable memory", usable_memory_text(plan) + (_VARYING if plan.lacking and plan.offload else "")),
        ("host memory", host_text(plan)),
        ("disk", disk_text(plan)),
        ("work divided", divided_work_text(plan)),
        ("certificate", certificate_text(plan)),
        ("constraints", constraint_cost_text(plan)),
        ("not covered", " ".join(list_main_uncovered_choices(plan))),
        ("alternatives", candidate_counts(certificate)),
        ("search", cut_off(certificate)),
    ]
    return build_pair_grid([(name, value) for name, value in rows if value])


def _describe_ranks(plan: Plan) -> str:
    """Return the number of ranks of ``plan`` as text. If experts are spread over ranks, the text says that the mesh
    axis ``ep`` adds none."""
    inside = [axis for axis in ("dp", "cp", "tp") if plan.mesh.get(axis, 1) > 1]
    spread = f"; ep is a part of {' × '.join(inside)}" if plan.mesh.get("ep", 1) > 1 and inside else ""
    return format_plural(plan.world_size, "rank") + spread


def precision_text(plan: Plan) -> str:
    """Return the precision of the computation of ``plan`` as text: the one that was asked for, or the type of most
    weights."""
    if plan.precision:
        return plan.precision
    kept = common_precision(plan.written) if plan.written is not None else ""
    return f"{kept}, the type of most parameters" if kept else "that of the parameters"


def divided_work_text(plan: Plan) -> str:
    """Return a text that says which fraction of the FLOPs of matrix products the ranks of ``tp`` and ``cp`` divide
    among them; empty if these axes have one rank. The other axes divide samples, stages and experts: all of the
    work."""
    over = [axis for axis in ("cp", "tp") if plan.mesh.get(axis, 1) > 1]
    if not over:
        return ""
    share = plan.shares.matmul_sharded
    rest = "" if share > 1 - 5e-4 else "; every rank computes the rest"
    axes, verb = " and ".join(over), "divide" if len(over) > 1 else "divides"
    return f"{axes} {verb} {format_percent(share)} of the FLOPs of matrix products{rest}"


def execution_text(plan: Plan) -> str:
    """Return a text on how ranks execute instructions, such as ``compiled between collectives``; empty if they run one
    operator after another. The constraints of ``plan`` decide, or else the assumption of its estimates."""
    assumed = "compiled" if plan.profile.fused_kernels else "eager"
    given = plan.constraints.execution if plan.profile.name == OURS.name else None
    return _EXECUTION[given or assumed]


def waiting_text(plan: Plan) -> str:
    """Return a text on the fraction of the step in which ranks of ``plan`` wait for others; empty if they do not."""
    shares = bubble_text(plan)
    return f"{shares}: the share of the step in which a rank waits for other ranks" if shares else ""


def throughput_text(plan: Plan) -> str:
    """Return the tokens per second (samples per second for a model without sequences) of ``plan`` as text, in total and
    per device; empty if no input has a batch dimension.
    """
    step, samples = plan.estimate.step_time, plan.global_batch
    if not step or not samples:
        return ""
    each, what = (plan.tokens_per_step, "tokens") if plan.tokens_per_step else (samples, "samples")
    alone = f", {count_text(each / step / plan.world_size)} per device" if plan.world_size > 1 else ""
    return f"{count_text(each / step)} {what}/s{alone}"


def mfu_text(plan: Plan) -> str:
    """Return the model FLOPs utilisation of ``plan`` as text, such as ``41%``. If all devices have the same peak rate,
    the text also has the achieved FLOP/s per device and this peak.
    """
    mfu, peak = plan.estimate.mfu, _find_peak_rate(plan)
    rates = f", {format_digits(mfu * peak / 1e12)} of {peak_rate_text(plan)} per device" if peak else ""
    masked = "; of attention only the pairs that the mask leaves, half of all if it is causal"
    return f"{format_percent(mfu)}{rates}: the FLOPs of the model, without recomputation{masked}"


def peak_rate_text(plan: Plan) -> str:
    """Return the peak rate of the devices in the precision of ``plan`` as text, such as ``989 TFLOP/s``; empty if
    devices have different rates or the precision is unknown."""
    peak = _find_peak_rate(plan)
    return f"{format_digits(peak / 1e12)} TFLOP/s" if peak else ""


def _find_peak_rate(plan: Plan) -> float | None:
    """Return the peak FLOP/s of each device of ``plan`` in its precision; ``None`` if devices differ or the precision
    is unknown."""
    precision = plan.precision or (common_precision(plan.written) if plan.written is not None else "")
    kinds = {plan.topology.devices[device].kind for device in plan.devices} if precision else set()
    rates = {plan.topology.types[kind].peak_of(precision) for kind in kinds}
    return next(iter(rates)) if len(rates) == 1 else None


def read_baseline_seconds(baseline: Baseline) -> float:
    """Return the step time in seconds of ``baseline``, a layout that is compared with the plan; 0 if it has none."""
    return (baseline.candidate.step_time or 0.0) if baseline.candidate is not None else 0.0


def baseline_text(candidate: Candidate) -> str:
    """Return the layout ``candidate`` (mesh, ZeRO stage) and its microbatch size as text, such as ``dp 64, zero 3,
    microbatch of 2 samples``."""
    return f"{candidate_text(candidate)}, microbatch of {format_plural(candidate.microbatch_size, 'sample')}"


def find_excluded_baseline(plan: Plan) -> Baseline | None:
    """Return the fastest standard layout that the constraints of the user exclude from ``plan``; ``None`` if none has a
    step time."""
    found = [b for b in plan.certificate.baselines if b.excluded and read_baseline_seconds(b)]
    return min(found, key=read_baseline_seconds, default=None)


def find_fewer_devices(plan: Plan) -> Baseline | None:
    """Return the fastest plan found that leaves some devices of ``plan`` idle; ``None`` if there is none."""
    found = [b for b in plan.certificate.baselines if b.name.startswith(WITHOUT) and read_baseline_seconds(b)]
    return min(found, key=read_baseline_seconds, default=None)


def find_offload_alternative(plan: Plan) -> Baseline | None:
    """Return the plan with optimizer states in host memory that the search found in addition to ``plan``, which has no
    offload; ``None`` if there is none."""
    found = (b for b in plan.certificate.baselines if b.offload and not plan.offload and read_baseline_seconds(b))
    return next(found, None)


def find_other_batch(plan: Plan) -> Baseline | None:
    """Return the plan that the search found for another number of samples than a step of ``plan`` has; ``None`` if
    there is none."""
    found = (b for b in plan.certificate.baselines if b.global_batch and plan.global_batch and read_baseline_seconds(b))
    return next(found, None)


def constraint_cost_text(plan: Plan) -> str:
    """Return a text on what the user's constraints cost: the fastest standard layout that they exclude, and by which
    fraction its step is shorter than a step of ``plan``. Empty if no such layout is faster.
    """
    step, baseline = plan.certificate.objective, find_excluded_baseline(plan)
    if baseline is None or baseline.candidate is None or (least := read_baseline_seconds(baseline)) >= step:
        return ""
    layout = f"{baseline.name} ({baseline_text(baseline.candidate)})"
    return f"cost {format_percent(1 - least / step)} or more: {layout}, which they exclude, takes {seconds_text(least)}"


def fewer_text(plan: Plan) -> str:
    """Return a text that gives the number of devices and the step time of the fastest plan found that leaves some
    devices idle, compared with ``plan``; empty if no such plan was found.
    """
    step, best = plan.certificate.objective, find_fewer_devices(plan)
    if best is None or best.candidate is None:
        return ""
    seconds, mesh = read_baseline_seconds(best), best.candidate.mesh
    less = f"{format_percent(1 - seconds / step)} less" if seconds < (1 - _SAME) * step else "no more"
    ranks = math.prod(size for axis, size in mesh.items() if axis != "ep")
    return f"on {ranks:,} of the {plan.world_size:,} a step takes {seconds_text(seconds)}, {less} ({mesh_text(mesh)})"


def offload_alternative_text(plan: Plan) -> str:
    """Return a text that gives the step time of the plan with optimizer states in host memory that the search found,
    compared with ``plan``, which has no offload; empty if none was found.
    """
    found = find_offload_alternative(plan)
    if found is None or found.candidate is None:
        return ""
    seconds, mesh = read_baseline_seconds(found), mesh_text(found.candidate.mesh)
    less = format_percent(1 - seconds / plan.certificate.objective)
    kinds = "+".join(found.offload)
    return f'{format_offload(found)} a step takes {seconds_text(seconds)}, {less} less ({mesh}): offload="{kinds}"'


def other_batch_text(plan: Plan) -> str:
    """Return a text that compares ``plan`` with the plan that the search found for another number of samples in a step:
    its step time and its time per sample; empty if none was found.
    """
    found = find_other_batch(plan)
    if found is None:
        return ""
    taken = per_sample_text(plan, found.global_batch, read_baseline_seconds(found))
    return f"of {format_plural(found.global_batch, 'sample')}: a step takes {taken}"


def per_sample_text(plan: Plan, global_batch: int, seconds: float) -> str:
    """Return a text such as ``7 s, 5% less per sample``: the step time with another batch size, and how the time per
    sample differs from ``plan``. ``global_batch``: samples of the other batch. ``seconds``: its step time.
    """
    ratio = seconds / global_batch / (plan.certificate.objective / plan.global_batch)
    return f"{seconds_text(seconds)}, {format_percent(abs(1 - ratio))} {'less' if ratio < 1 else 'more'} per sample"


def sharing_text(plan: Plan) -> str:
    """Return a text on how ``plan`` shards optimizer states, gradients and parameters over data-parallel ranks: the
    ZeRO stage, what is sharded, and the number of ranks; empty without training, or if no two ranks have the same
    states, so that there is nothing to shard.
    """
    if plan.objective != "train":
        return ""
    if plan.mesh.get("dp", 1) * plan.mesh.get("cp", 1) == 1 and not plan.chosen.zero:
        return ""  # no ranks have the same states
    zero, replicas = plan.chosen.zero, plan.mesh.get("dp", 1) // (plan.chosen.dp_shard or plan.mesh.get("dp", 1))
    ranks = plan.mesh.get("dp", 1) // replicas * plan.mesh.get("cp", 1)
    if not zero or ranks == 1:
        alone = "no other rank has the same states" if zero else "states are not sharded over data-parallel ranks"
        return f"ZeRO {zero}: {alone}{_format_expert_sharding(plan, 1) if zero else ''}"
    what = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")[
        zero - 1
    ]
    # their product is the number of ranks
    shares = {"dp": plan.mesh.get("dp", 1) // replicas, "cp": plan.mesh.get("cp", 1)}
    axes = "of " + " × ".join(axis for axis, size in shares.items() if size > 1)
    if replicas > 1 and min(shares.values()) > 1:
        axes = f"({' × '.join(f'{size} of {axis}' for axis, size in shares.items())})"
    more = f", in {replicas} replicas" if replicas > 1 else ""
    return f"ZeRO {zero}: {what} over {format_plural(ranks, 'rank')} {axes}{more}{_format_expert_sharding(plan, ranks)}"


def _format_expert_sharding(plan: Plan, ranks: int) -> str:
    """Return a clause that says over how many ranks the parameters, gradients and optimizer states of experts are
    sharded in ``plan``. (Only ranks with the same experts can shard them among each other.) The clause is empty if the
    number is ``ranks``, the number of ranks that shard all other parameters, or if experts are not distributed over
    ranks."""
    chosen, ep = plan.chosen, plan.mesh.get("ep", 1)
    parts = hybrid_mesh(plan.mesh, chosen.etp, chosen.dp_shard)
    shared, replicas = parts["edp_shard"], parts["edp_replicate"]
    if ep == 1 or shared == ranks:
        return ""
    if shared == 1:
        why = ", as no other rank has the same experts" if replicas == 1 else ""
        return f"; those of experts are not sharded{why}"
    more = f", in {replicas} replicas" if replicas > 1 else ""
    return f"; those of experts over {shared} ranks with the same experts{more}"


def recomputed_text(plan: Plan) -> str:
    """Return a text on which layers of ``plan`` are recomputed in backward, by stage if stages differ; empty without
    training, or if it is unknown.
    """
    stages = plan.estimate.stages
    if plan.objective != "train" or not stages:
        return ""
    by_text: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        by_text.setdefault(_format_recomputed(stage), []).append(number)
    told = [f"{'stages' if len(n) > 1 else 'stage'} {format_ranges(n)}: {text}" for text, n in by_text.items()]
    text = "; ".join(told) if len(by_text) > 1 else next(iter(by_text))
    part = partly_recomputed_text(plan)
    return f"{text} (in part: {part})" if part else text


def partly_recomputed_text(plan: Plan) -> str:
    """Return which operators of a layer are recomputed in backward, as text, if ``plan`` recomputes layers in part;
    empty if it does not."""
    part = _IN_PART.get(plan.constraints.recompute or "", _IN_PART["selective"])
    return part if any(stage.selective for stage in plan.estimate.stages) else ""


def _format_recomputed(stage: StageEstimate) -> str:
    """Return a text on how many calls of layers in ``stage`` are recomputed in backward, such as ``3 of 10 calls in
    full, 6 in part``. If the number of calls that are recomputed in part is not known, it says ``others in part``.
    """
    count = f"of {format_plural(stage.num_calls, 'call')}"
    whole = f"{stage.recomputed} {count} in full" if stage.recomputed else ""
    if stage.recomputed == stage.num_calls:
        whole = "all calls in full"
    part = ""
    if stage.selective and stage.recomputed < stage.num_calls:
        rest = "others" if whole else "calls"
        part = (f"{stage.in_part}" if whole else f"{stage.in_part} {count}") if stage.in_part else rest
        part += " in part"
    return ", ".join(filter(None, (whole, part))) or "nothing"


def bandwidth_text(plan: Plan) -> str:
    """Return the bandwidth per device of each kind of link in the topology of ``plan``, if all devices transfer at
    once, for example ``nvlink4 450 GB/s, ib-ndr 50 GB/s per device and direction``; empty for one rank.
    """
    if plan.world_size == 1:
        return ""
    rates = [f"{level.name} {level_rates(plan.topology, level)[1]}" for level in plan.topology.levels]
    return f"{', '.join(rates)} per device and direction" if rates else ""


def _find_batch_size(plan: Plan) -> int:
    """Return the number of samples in one step of ``plan``; 0 if no input has a batch dimension."""
    if plan.written is None:
        return plan.global_batch
    inputs = plan.written.inputs
    return next((i.shape[i.batch_dim] for i in inputs if i.batch_dim is not None and i.shape), 0)


def cut_off(certificate: Certificate) -> str:
    """Return a phrase for what ended the search early, such as ``cut off by its time limit``; empty if the search was
    complete. ``certificate``: the results of the search.
    """
    return f"cut off by {_ENDS[certificate.cut_off]}" if certificate.cut_off else ""


def candidate_counts(certificate: Certificate) -> str:
    """Return a text that says how many layouts (mesh, schedule, ZeRO stage) the search examined, and what it found for
    these layouts, for example ``24 layouts: 1 chosen; 3 tried and slower; 20 ruled out by lower bounds on their time``;
    empty if no layouts are listed. ``certificate``: the results of the search."""
    if not certificate.candidates:
        return ""
    known = Counter(_get_status(c, certificate) for c in certificate.candidates)
    counts = {status: known[status] + certificate.left.get(status, 0) for status in STATUS_WORDS}
    barred = sum(map(is_barred, certificate.candidates))
    counts["infeasible"] -= barred
    as_fast = sum(is_as_fast(candidate, certificate) for candidate in certificate.candidates)
    counts["solved"] -= as_fast
    chosen, *others = ((n, _COUNTED[s][n > 1]) for s, n in counts.items())
    words = [chosen, (as_fast, AS_FAST), *others, (barred, _NO_PLAN)]
    told = "; ".join(f"{n:,} {word}" for n, word in words if n)
    return f"{format_plural(sum(n for n, _ in words), 'layout')}: {told}"


def stage_table(plan: Plan, whole: Outline) -> Padding:
    """Return a table with one row per pipeline stage of ``plan``: its ranks and blocks (such as decoder layers), its
    parameters, its peak memory, and the forward and backward seconds of a step. ``whole``: the overview of the plan's
    program.
    """
    busy = [(stage.forward_s, stage.backward_s) for stage in plan.estimate.stages]
    busy = busy if len(busy) == len(whole.stages) else _simulate_stage_seconds(plan)
    train = plan.program.objective == "train"
    made = build_empty_table(
        [("stage", True), ("ranks", False), ("calls", False), ("parameters", True), ("per rank", True),
         ("peak (of usable)", True), _FORWARD_HEAD] + [_BACKWARD_HEAD] * train
    )  # fmt: skip
    rooms, peaks = list_usable_bytes(plan), plan.estimate.memory
    for stage in whole.stages:
        known = [r for r in stage.ranks if r < len(peaks)]
        rank = max(known, key=lambda r: share_of_usable(peaks[r], rooms[r]), default=None)
        often = Counter[str]()
        for group in stage.groups:  # each virtual stage has groups of its own
            often[group.title] += group.count
        calls = ", ".join((f"{count} × " if count > 1 else "") + blocks for blocks, count in often.items())
        row = [
            str(stage.index),
            format_ranges(stage.ranks),
            calls,
            count_text(stage.num_parameters),
            bytes_text(stage.parameter_bytes),
            "" if rank is None else _format_peak(peaks[rank], rooms[rank]),
        ]
        row += map(seconds_text, busy[stage.index][: 1 + train])
        made.add_row(*map(Text, row))
    return indent_part(made)


def _format_peak(peak: int, usable: int) -> str:
    """Return a peak and its fraction of the usable memory as text, such as ``67.4 GiB (92%)``. ``peak``, ``usable``:
    bytes.
    """
    return f"{bytes_text(peak)} ({format_percent(share_of_usable(peak, usable))})"


def _simulate_stage_seconds(plan: Plan) -> list[tuple[float, float]]:
    """Return the (forward, backward) seconds of each pipeline stage of ``plan`` in one step, from a simulation of the
    step.
    """
    from partitioner.simulate.program_time import stage_seconds

    return [(seconds.forward, seconds.backward) for seconds in stage_seconds(plan)]


def estimate_table(plan: Plan) -> Padding:
    """Return a table with one row per pipeline stage of ``plan``, from the cost model's estimates: ranks, layers, peak
    memory and seconds. It is used for plans without a program.
    """
    train = plan.objective == "train"
    made = build_empty_table(
        [("stage", True), ("ranks", False), ("calls", True), ("first call", False), ("last call", False),
         ("peak (of usable)", True), _FORWARD_HEAD] + [_BACKWARD_HEAD] * train
    )  # fmt: skip
    size = plan.world_size // max(1, len(plan.estimate.stages))
    rooms = list_usable_bytes(plan)
    for number, stage in enumerate(plan.estimate.stages):
        ranks = range(number * size, (number + 1) * size)
        peak, room = sum(stage.memory.values()), min(rooms[r] for r in ranks)
        row = [str(number), format_ranges(ranks), str(stage.num_calls), stage.first, stage.last]
        row += [_format_peak(peak, room), seconds_text(stage.forward_s)]
        made.add_row(*map(Text, row + [seconds_text(stage.backward_s)] * train))
    return indent_part(made)


def candidate_table(plan: Plan, most: int = _MOST_CANDIDATES) -> Padding:
    """Return a table of the layouts (mesh, schedule, ZeRO stage) that the search of ``plan`` examined: the chosen one
    first, then by step time or its lower bound. ``most``: largest number of rows. If there are more layouts, one
    further row says how many are left out.
    """
    made = build_empty_table(
        [("mesh", False), ("microbatch", True), ("schedule", False), ("step time", True), ("at least", True),
         ("memory", True), ("outcome", False)]
    )  # fmt: skip
    for candidate in best_first(plan.certificate.candidates)[:most]:
        outcome = status_word(candidate, plan.certificate)
        outcome += "" if is_covered(candidate, plan.certificate) else UNCOVERED_MARK
        outcome += f": {candidate.reason}" if candidate.reason else ""
        made.add_row(
            candidate_text(candidate),
            str(candidate.microbatch_size),
            candidate.schedule,
            seconds_text(candidate.step_time, STEP_PLACES) if candidate.step_time is not None else "",
            seconds_text(candidate.bound, STEP_PLACES) if candidate.bound else "",
            _format_candidate_memory(candidate, plan),
            Text(outcome),
            style="bold" if candidate.status == "chosen" else None,
        )
    rest = len(plan.certificate.candidates) + sum(plan.certificate.left.values()) - most
    if rest > 0:
        made.add_row(f"and {rest:,} more")
    return indent_part(made)


def fullest_bytes(plan: Plan) -> int | None:
    """Return the peak bytes of the rank of ``plan`` that uses the largest fraction of its usable memory; ``None`` if
    the plan has no memory estimate.
    """
    return plan.estimate.memory[fullest_rank(plan)] if plan.estimate.memory else None


def _format_candidate_memory(candidate: Candidate, plan: Plan) -> str:
    """Return the peak memory of the fullest rank as text, such as ``67.4 GiB``, if the plan had the layout
    ``candidate``; empty if it is unknown. ``candidate``: a layout (mesh, microbatch size, schedule, ZeRO stage) that
    the search for a plan examined. ``plan``: the result of the search, whose own memory estimate is used for the chosen
    layout.
    """
    if candidate.status == "chosen" and (most := fullest_bytes(plan)) is not None:
        return bytes_text(most)
    return bytes_text(candidate.memory) if candidate.memory is not None else ""


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return ``candidates``, the layouts that a search examined, sorted by outcome, then by step time or its lower
    bound. The order of outcomes: the chosen layout, those with a computed step time, those ruled out by a lower bound,
    those without a plan.
    """
    order = {"chosen": 0, "solved": 1, "bounded": 2, "infeasible": 3}
    return sorted(candidates, key=lambda c: (order[c.status], c.step_time or c.bound, sorted(c.mesh.items())))


def collective_table(whole: Outline) -> Padding | None:
    """Return a table of the bytes that collectives transfer in one call of each type of block (such as a decoder
    layer), per microbatch; ``None`` if there are none. ``whole``: the overview of a program (what each rank executes).
    """
    made = build_empty_table([("each call of", False), ("collective", False), ("forward", True), ("backward", True)])
    told: set[tuple[str, ...]] = set()
    for group in (g for stage in whole.stages for g in stage.groups):
        if not group.collectives or group.blocks in told:
            continue
        told.add(group.blocks)
        name = group.title
        for op, axis in dict.fromkeys((m.op, m.axis) for m in group.collectives):
            amounts = []
            for direction in ("forward", "backward"):
                found = [m for m in group.collectives if (m.op, m.axis, m.direction) == (op, axis, direction)]
                amounts.append(found[0].amount(group.count) if found else "")
            made.add_row(Text(name), f"{COLLECTIVE_NAMES.get(op, op)} over {axis}", *amounts)
            name = ""
    return indent_part(made) if told else None


def rule_table(plan: Plan) -> Padding | None:
    """Return a table of the operators that every rank of ``plan`` runs in full because no sharding rule exists for
    them, with their fraction of the work; ``None`` if there are none.
    """
    shares = sorted(plan.shares.without_rule.items(), key=lambda item: -item[1])
    if not shares:
        return None
    made = build_empty_table([("operator without a rule", False), ("share of the work", True)])
    for name, share in shares:
        made.add_row(Text(name), format_percent(share) if share >= 5e-4 else f"{format_digits(100 * share, 1)}%")
    return indent_part(made)


def build_bar_chart(shares: Sequence[tuple[str, float, str]], width: int = 30) -> Padding:
    """Return a bar chart as a grid of text. ``shares``: (name, fraction of the total, value as text) of each bar.
    ``width``: characters of a bar for the fraction 1. If there is little room, names are wrapped and values are not.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    for justify in ("right", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    for name, share, value in shares:
        grid.add_row(Text(name), Text(value), format_percent(share), Text("█" * round(width * share), style="cyan"))
    return indent_part(grid)


def format_text_line(text: str) -> RenderableType:
    """Return ``text`` as an indented line of a section of a text report."""
    return indent_part(Text(text))


def describe_outcome(candidate: Candidate, chosen: float, unhosted: str = "") -> str:
    """Return a phrase for what the search found for ``candidate``, such as ``takes 7 s, 5% more``. ``candidate``: a
    layout (mesh, microbatch size, schedule, ZeRO stage) that the search for a plan examined. ``chosen``: the step time
    of the chosen plan in seconds. ``unhosted``: a phrase that says with how much offload to host memory the layout
    was tried; it is inserted if the layout does not fit in memory. Empty: nothing is inserted.
    """
    why = f" ({candidate.reason})" if candidate.reason else ""
    if candidate.status == "chosen":
        return "this is the plan"
    if candidate.status == "infeasible":
        if is_barred(candidate):
            return f"{_NO_PLAN}{why}"
        return f"{' '.join(filter(None, (STATUS_WORDS[candidate.status], unhosted)))}{why}"
    if candidate.status == "solved" and candidate.step_time is not None:
        ratio = candidate.step_time / chosen if chosen else 1.0
        more = f"{format_digits(ratio, 2)} times as long" if ratio >= 2 else f"{format_percent(abs(ratio - 1))} "
        more += "" if ratio >= 2 else "more" if ratio >= 1 else "less"
        return f"takes {list_distinct_seconds_texts(candidate.step_time, chosen)[0]}, {more}{why}"
    least, _ = list_distinct_seconds_texts(candidate.bound, chosen)
    if candidate.bound < chosen * (1 - _ROUNDING):
        return f"was not tried; it takes {least} or more, so it may be faster{why}"
    return f"takes {least} or more, so it was ruled out{why}"


_ALGORITHMS = {
    "ring": "keys and values pass around a ring of ranks, behind the computation",
    "all_gather": "every rank gathers all keys and values",
    "ulysses": "an all-to-all gives each rank all positions of a part of the heads",
}


def explain_sequence_axis(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on how ``plan`` divides sequences over the mesh axis ``cp``: its size, the attention algorithm, other
    attention algorithms with their step times, and the best layout without this axis. Nothing is yielded if the axis
    has one rank.
    """
    cp, chosen = plan.mesh.get("cp", 1), plan.certificate.objective
    if cp == 1:
        return
    held = sorted({value.context for value in plan.written.values.values()}) if plan.written is not None else []
    zigzag = any(layout.endswith("z") for layout in held)
    order = ", a piece from either end to balance causal attention" if zigzag else ", consecutive positions"
    yield format_text_line(
        f"Each rank has 1/{cp} of every sequence{order if held else ''}, and 1/{cp} of its activations."
    )
    for way in plan.context:
        words = _ALGORITHMS.get(way.algorithm)
        what = f"{way.algorithm} ({words})" if words else way.algorithm
        if way.calls:
            more = f"; a step takes {seconds_text(way.step_time)}" if way.step_time is not None else ""
            yield format_text_line(f"- {format_plural(way.calls, 'attention call')} by {what}{more}")
        elif way.step_time is not None:
            against = _format_change(way.step_time, chosen)
            yield format_text_line(f"- by {what} a step would take {seconds_text(way.step_time)}, {against}")
        else:
            yield format_text_line(f"- {what} is not possible: {way.reason}")
    if plan.constraints.cp is not None:
        return
    yield from _explain_without_axis(plan, "cp", "Without context parallelism (cp 1)")


def explain_expert_axis(plan: Plan) -> Iterator[RenderableType]:
    """Yield lines on how ``plan`` distributes experts over the mesh axis ``ep``, and on the step times with other sizes
    of this axis. Nothing is yielded if the axis has one rank.
    """
    ep, program = plan.mesh.get("ep", 1), plan.written
    if ep == 1:
        return
    spread = [s for s in program.states.values() if Layout.parse(s.expert_layout).is_shard] if program else []
    if program is not None and spread:
        numbers = sorted({s.shape[Layout.parse(s.expert_layout).dim] for s in spread})
        of_layer = " or ".join(f"{n // ep} of {n}" for n in numbers)
        nodes = {int(plan.topology.node_of[plan.devices[rank]]) for rank in program.group(0, ("ep",))}
        size = sum(math.prod(s.shape) * get_dtype_itemsize(s.dtype) for s in spread)
        yield format_text_line(
            f"Each rank holds {of_layer} experts of a layer. Tokens are sent to the ranks that hold their experts, and "
            f"back, among {ep} ranks on {format_plural(len(nodes), 'node')}. All experts together have "
            f"{bytes_text(size)} of "
            "parameters."
        )
    yield format_text_line(
        "Time and memory assume that all experts get equally many tokens. A rank that gets more needs more of both."
    )
    if plan.constraints.ep is not None:
        return
    yield from _explain_without_axis(plan, "ep", "Without expert parallelism (ep 1)")
    of_size: dict[int, list[Candidate]] = {}
    for candidate in plan.certificate.candidates:
        of_size.setdefault(candidate.mesh.get("ep", 1), []).append(candidate)
    others = {size: of for size, of in sorted(of_size.items()) if size not in (1, ep)}
    bounded = {size: of for size, of in others.items() if all(c.status == "bounded" for c in of)}
    for size in (size for size in others if size not in bounded):
        yield from _explain_without_axis(plan, "ep", f"With ep {size}", size)
    if bounded:
        sizes, least = ", ".join(map(str, bounded)), min(c.bound for of in bounded.values() for c in of)
        yield format_text_line(f"With ep {sizes} every plan takes {seconds_text(least)} or more, so none was tried.")


def _explain_without_axis(plan: Plan, axis: str, words: str, size: int = 1) -> Iterator[RenderableType]:
    """Yield a line on the best layout that the search of ``plan`` found with ``size`` ranks on the mesh axis ``axis``,
    for comparison with the plan. It has the layout's step time, or a lower bound if none was computed, or says that no
    such layout fits in memory. Nothing is yielded if the search had no layout of this size. ``words``: the beginning of
    the line, which names this size.
    """
    others = [c for c in plan.certificate.candidates if c.mesh.get(axis, 1) == size]
    chosen = plan.certificate.objective
    solved = [c for c in others if c.step_time is not None]
    if solved:
        best = min(solved, key=lambda c: c.step_time or 0.0)
        yield format_text_line(
            f"{words} the best plan found is {candidate_text(best)}: it {describe_outcome(best, chosen)}."
        )
    elif others and all(c.status == "infeasible" for c in others):
        short = min(others, key=lambda c: c.missing or 0)
        yield format_text_line(
            f"{words} no plan fits: {candidate_text(short)} "
            f"{describe_outcome(short, chosen, describe_tried_offload(plan))}."
        )
    elif others:
        least = min(c.bound for c in others if c.status != "infeasible")
        yield format_text_line(f"{words} every plan takes {seconds_text(least)} or more, so none was tried.")


def _format_change(seconds: float, chosen: float) -> str:
    """Return a text that says how a step of ``seconds`` compares with the plan's step of ``chosen`` seconds, such as
    ``5.0% more``."""
    change = seconds / chosen - 1 if chosen else 0.0
    return f"{format_percent(abs(change))} {'more' if change >= 0 else 'less'}"
