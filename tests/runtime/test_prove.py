"""The prover: what it lets pass, what it refuses, and what it says."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from partitioner.emit.buckets import ReductionScheme
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import Program, RankProgram
from partitioner.runtime.prove.errors import ProofError
from partitioner.runtime.prove.prove import prove
from tests.helpers.mutations import Mutant, change, mutate, with_stage
from tests.helpers.symbolic import Crash, Hang, run_symbolic
from tests.helpers.tiny_programs import tiny_program

CONFIGS: list[dict[str, Any]] = [
    {"pp": 2, "dp": 2, "num_microbatches": 3},
    {"pp": 3, "tp": 2, "schedule": "gpipe"},
    {"pp": 2, "dp": 2, "tp": 2, "tied": False, "bucket_bytes": 100},
    {"pp": 4, "recompute": [3, 4]},
    {"pp": 3, "objective": "infer"},
    {"pp": 1, "dp": 2, "bucket_bytes": 64},
    {"pp": 5, "dp": 2, "tp": 2, "num_microbatches": 2},
    {"pp": 2, "num_microbatches": 1},
    {"pp": 2, "num_microbatches": 3, "num_layers": 5, "schedule": "interleaved", "chunks": 2},
    {"pp": 3, "tp": 2, "num_microbatches": 3, "schedule": "zb-1p"},
    {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "zb-v", "bucket_bytes": 100},
    {"pp": 3, "num_microbatches": 2, "num_layers": 5, "schedule": "dualpipe-v"},
    {"pp": 2, "dp": 4, "bucket_bytes": 100, "reducing": ReductionScheme(inside=2)},
    {"pp": 2, "dp": 4, "bucket_bytes": 100, "reducing": ReductionScheme(inside=2, compression="int8")},
    {"pp": 1, "dp": 2, "tp": 2, "bucket_bytes": 64, "reducing": ReductionScheme(compression="bf16")},
]
Code = list[Instruction]


def place(code: Code, text: str) -> int:
    return next(k for k, i in enumerate(code) if str(i) == text)


def edited(program: Program, rank: int, edit: Callable[[Code], None]) -> dict[int, RankProgram]:
    """The program of one rank, its list changed by ``edit``."""
    code = list(program.rank(rank).instructions)
    edit(code)
    return {rank: program.rank(rank).with_instructions(tuple(code))}


def on_stage(program: Program, stage: int, edit: Callable[[Code], None]) -> Program:
    code = list(program.stages[stage].instructions)
    edit(code)
    return with_stage(program, stage, instructions=tuple(code))


def refusal(program: Program, ranks: dict[int, RankProgram] | None = None, **options: Any) -> ProofError:
    with pytest.raises(ProofError) as caught:
        prove(program, ranks, **options)
    return caught.value


# --- what is emitted passes, what is damaged does not -----------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_emitted_programs_are_proven(config: dict[str, Any]):
    program = tiny_program(**config)
    proof = prove(program, {r: program.rank(r) for r in range(program.world_size)})
    assert proof.ranks == program.world_size
    assert proof.distinct_lists == len(program.stages)
    sends = sum(i.op.startswith("SEND") for s in program.stages for i in s.instructions)
    assert proof.transfers == sends * program.world_size // len(program.stages)


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_damaged_programs(seed: int):
    """Whatever hangs, crashes or computes something else is refused; what is refused besides is documented."""
    random_ = random.Random(seed)
    programs = [tiny_program(**config) for config in CONFIGS]
    results = [run(Mutant("", p, {})) for p in programs]
    judged = 0
    while judged < 250:
        k = random_.randrange(len(programs))
        mutant = mutate(programs[k], random_)
        if mutant.program == programs[k] and mutant.lists == Mutant("", programs[k], {}).lists:
            continue
        judged += 1
        outcome = run(mutant)
        error = attempt(mutant)
        if error is None:
            assert outcome == results[k], f"{mutant.what} was let pass: {outcome}"
            continue
        assert error.instruction, mutant.what
        assert 0 <= error.rank < programs[k].world_size
        assert outcome != results[k] or is_documented(error), f"{mutant.what} is harmless, but refused: {error}"


def test_a_thousand_ranks_take_seconds():
    """16 stages of 4 calls, 16 x 4 ranks each, 32 microbatches; one rank's list is its own."""
    program = tiny_program(16, 16, 4, 32, num_layers=61)
    own = edited(program, 5, lambda code: code.insert(-1, code.pop(place(code, "0FREE31"))))
    start = time.process_time()
    assert prove(program).ranks == prove(program, own).ranks == 1024
    assert time.process_time() - start < 30


def run(mutant: Mutant) -> Any:
    """What the ranks compute, or how they fail."""
    try:
        return run_symbolic(mutant.program, mutant.lists)
    except (Crash, Hang) as error:
        return repr(error)
    except (ValueError, RuntimeError, AssertionError, KeyError) as error:  # a graph that cannot even be traced
        return repr(error)


def attempt(mutant: Mutant) -> ProofError | None:
    try:
        prove(mutant.program, mutant.edited)
    except ProofError as error:
        return error
    return None


def is_documented(error: ProofError) -> bool:
    """Whether ``runtime/prove/prove.py`` says that such programs are refused although they may run."""
    if error.fault in ("structure", "fields", "twice", "leak"):
        return True
    adding = ("STEP", "REDUCE", "SYNC", "SCATTER", "GATHER")
    early = any(op in error.instruction for op in adding)
    return "to free" in str(error) or (early and error.fault in ("missing", "gradient", "order"))


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_a_value_freed_too_early_is_named():
    def edit(code: Code) -> None:
        code.insert(place(code, "0F0") + 1, code.pop(place(code, "0SEND_F0") + 1))  # FREE before SEND_F

    program = tiny_program(pp=2)
    error = refusal(program, edited(program, 0, edit))
    assert (error.rank, error.index, error.instruction, error.fault) == (0, 4, "0SEND_F0", "order")
    assert str(error) == (
        "rank 0, instruction 4 (0SEND_F0): reads 'h0' of microbatch 0, which was freed at instruction 2"
    )


def test_a_gradient_is_not_taken_before_it_is_whole():
    def edit(code: Code) -> None:
        received = code.pop(place(code, "0RECV_B0"))
        code.insert(place(code, "0B0") + 1, received)

    error = refusal(on_stage(tiny_program(pp=2), 0, edit))
    assert error.instruction == "0B0"
    assert "uses the gradient of 'h3' of microbatch 0 before the part of stage 1 is received" in str(error)


def test_a_bucket_waits_for_the_last_backward():
    def edit(code: Code) -> None:
        code.insert(place(code, "0B1"), code.pop(place(code, "0REDUCE:0")))

    error = refusal(on_stage(tiny_program(pp=1, dp=2, tied=False), 0, edit))
    assert (error.rank, error.instruction, error.fault) == (0, "0REDUCE:0", "gradient")
    assert "lacks the backward of" in str(error)


def test_a_leak_is_reported_where_it_is_made():
    def edit(code: Code) -> None:
        del code[place(code, "0F1") + 1]

    error = refusal(on_stage(tiny_program(pp=2), 0, edit))
    assert (error.instruction, error.fault) == ("0LOAD1", "leak")
    assert "'x' of microbatch 1 is computed or received here and never freed" in str(error)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("0F0", {"calls": None}, "F needs calls"),
        ("0F0", {"peer": 1}, "F has no peer; got 1"),
        ("0F0", {"calls": (2, 9)}, "calls 2 to 9; the stage has 5"),
        ("0F0", {"microbatch": 7}, "microbatch 7 of 2"),
        ("0F0", {"stage": 1}, "is of stage 1; this rank is on stage 0"),
        ("0SEND_F0", {"peer": 0}, "the peer is stage 0; expected another of the stages 0 to 1"),
        ("0SEND_F0", {"values": ("h0", "ghost")}, "the value 'ghost' does not exist"),
        ("0SYNC", {"states": ("layers.0.up",)}, "the state 'layers.0.up' is not tied on this stage"),
    ],
)
def test_fields_are_checked(text: str, changes: dict[str, Any], message: str):
    def edit(code: Code) -> None:
        code[place(code, text)] = change(code[place(code, text)], **changes)

    error = refusal(on_stage(tiny_program(pp=2), 0, edit))
    assert message in str(error)
    assert error.rank == 0


# --- several ranks ----------------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_are_shown_in_a_circle():
    def edit(code: Code) -> None:
        received = code.pop(place(code, "0RECV_B0"))
        code.insert(place(code, "0SEND_F0"), received)

    error = refusal(on_stage(tiny_program(pp=2, num_microbatches=1), 0, edit))
    assert error.fault == "deadlock"
    assert (error.rank, error.instruction) == (0, "0RECV_B0")
    assert str(error).endswith(
        "waits for ever (2 of 2 ranks are stuck): "
        "rank 0 at instruction 3 receives gradients of h0, h3 of microbatch 0, waiting for rank 1; "
        "rank 1 at instruction 5 receives h0, h3 of microbatch 0, waiting for rank 0"
    )


def test_a_collective_that_one_rank_runs_for_another_microbatch():
    """All shapes agree, so nothing would fail: the ranks would add up different samples."""

    program = tiny_program(pp=1, tp=2, schedule="gpipe")
    code = list(program.stages[0].instructions)
    forwards = [k for k, i in enumerate(code) if i.op == "F"]
    loads = [k for k, i in enumerate(code) if i.op == "LOAD"][-2:]
    for a, b in (forwards, loads):
        code[a], code[b] = code[b], code[a]
    frees = [k for k, i in enumerate(code) if i.op == "FREE" and "h1" in i.values and not i.gradients]
    code[frees[0]], code[frees[1]] = code[frees[1]], code[frees[0]]
    error = refusal(program, {1: program.rank(1).with_instructions(tuple(code))})
    assert (error.rank, error.instruction, error.fault, error.node) == (1, "0F1", "match", "all_reduce")
    assert "on microbatch 1 with the ranks 0, 1, where rank 0" in str(error)


def test_reductions_in_another_order_on_one_rank():
    def edit(code: Code) -> None:
        code.insert(-1, code.pop(place(code, "0REDUCE:0")))

    # Two buckets with other groups, (dp) and (dp, tp): each group has but one reduction, so their order is free.
    program = tiny_program(pp=1, dp=2, tp=2, tied=False)
    assert prove(program, edited(program, 3, edit)).distinct_lists == 2
    program = tiny_program(pp=1, dp=2, tied=False, bucket_bytes=100)
    error = refusal(program, edited(program, 1, edit))
    assert (error.rank, error.fault) == (1, "match")
    assert "enters all_reduce of bucket 1 with the ranks 0, 1, where rank 0" in str(error)


def test_a_transfer_of_another_microbatch():
    """Stage 1 swaps its microbatches in everything but what it receives from stage 0."""
    program = tiny_program(pp=2, schedule="gpipe")
    other = {0: 1, 1: 0}
    code = list(program.stages[1].instructions)
    for k in range(place(code, "1TOTAL") + 1, len(code)):
        if code[k].microbatch is not None:
            code[k] = change(code[k], microbatch=other[code[k].microbatch])
    error = refusal(with_stage(program, 1, instructions=tuple(code)))
    assert (error.rank, error.instruction, error.fault) == (1, "1RECV_F1", "match")
    assert "receives h0, h3 of microbatch 1 from rank 0, which sends h0, h3 of microbatch 0 at its instr" in str(error)


def test_a_send_that_nobody_receives():
    def edit(code: Code) -> None:
        del code[place(code, "0RECV_B1") : place(code, "0SYNC")]

    error = refusal(on_stage(tiny_program(pp=2), 0, edit))
    assert error.rank == 0
    assert error.fault in ("missing", "gradient")


# --- the program's data -----------------------------------------------------------------------------------------------


def with_nodes(program: Program, block: str, edit: Callable[[list[dict[str, Any]]], None]) -> Program:
    graph = program.blocks[block]
    nodes = [dict(n) for n in graph.nodes]
    edit(nodes)
    return program.model_copy(
        update={"blocks": {**program.blocks, block: graph.model_copy(update={"nodes": tuple(nodes)})}}
    )


def test_a_missing_forward_collective_is_seen_at_its_value():
    def edit(nodes: list[dict[str, Any]]) -> None:
        node = next(n for n in nodes if n.get("target") == "partition.all_reduce.default")
        node.update(target="aten.mul.Tensor", args=[node["args"][0], 1.0])

    error = refusal(with_nodes(tiny_program(pp=2, tp=2), "layer", edit))
    assert "'layers.0': the value 'h1' is said to be whole over tp, but differs from rank to rank" in str(error)
    assert (error.rank, error.instruction) == (0, "0F0")
    assert error.node


def test_a_missing_backward_collective_is_seen_at_its_gradient():
    def edit(nodes: list[dict[str, Any]]) -> None:
        node = next(n for n in nodes if n.get("target") == "partition.copy.default")
        node.update(target="aten.mul.Tensor", args=[node["args"][0], 1.0])

    error = refusal(with_nodes(tiny_program(pp=2, tp=2), "layer", edit))
    assert "the gradient of 'h0' should be whole over tp, but differs from rank to rank" in str(error)


def test_a_collective_over_an_axis_that_is_not_there():
    def edit(nodes: list[dict[str, Any]]) -> None:
        node = next(n for n in nodes if n.get("target") == "partition.all_reduce.default")
        node["args"] = ["dq" if a == "tp" else a for a in node["args"]]

    error = refusal(with_nodes(tiny_program(pp=2, tp=2), "layer", edit))
    assert "on the axis 'dq'; the mesh has dp, cp, tp, ep, data" in str(error)
    assert error.node == "all_reduce_default"


def test_a_value_of_another_shape_is_named_with_its_node():
    program = tiny_program(pp=2)
    values = {**program.values, "h2": program.values["h2"].model_copy(update={"shape": (2, 5)})}
    error = refusal(program.model_copy(update={"values": values}))
    assert "'h2' is float32[2, 5], but float32[2, 4] in the graph" in str(error)
    assert error.node == "add_tensor_1"


def test_a_gradient_reduced_over_too_few_ranks():
    program = tiny_program(pp=1, dp=2, tp=2)
    buckets = tuple(b.model_copy(update={"axes": ("dp",)}) for b in program.stages[0].buckets)
    error = refusal(with_stage(program, 0, buckets=buckets))
    assert "is added up over ('dp',), but the gradient of" in str(error)
    assert "REDUCE" in error.instruction


def test_memory_limits_name_the_fullest_instruction():
    program = tiny_program(pp=2, schedule="gpipe", num_microbatches=4)
    peaks = prove(program, memory_limits=10**6).peak_bytes
    assert prove(program, memory_limits=list(peaks)).peak_bytes == peaks
    error = refusal(program, memory_limits=[peaks[0], peaks[1] - 1])
    assert (error.rank, error.fault) == (1, "memory")
    assert f"holds {peaks[1]:,} bytes, 1 more than the {peaks[1] - 1:,} that it may" in str(error)
    refusal(program, memory_limits=list(peaks), extra_bytes=[0, 1])


def test_another_programs_rank_is_refused():
    error = refusal(tiny_program(pp=2), {1: tiny_program(pp=2, num_microbatches=1).rank(1)})
    assert "is of another program" in str(error)


def test_errors_survive_a_process_boundary():
    program = tiny_program(pp=2)
    error = refusal(with_stage(program, 1, instructions=()))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.fault) == (str(error), error.rank, error.fault)
