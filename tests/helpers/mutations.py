"""Random small damage to a valid program: to one rank's list, to that of a whole stage, or to the program's data."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.program import Program, RankProgram

Lists = dict[int, tuple[Instruction, ...]]
AXES = ["dp", "tp", "ep", "pp"]


@dataclass
class Mutant:
    what: str
    program: Program
    edited: dict[int, RankProgram]

    @property
    def lists(self) -> Lists:
        ranks = {r: self.program.rank(r) for r in range(self.program.world_size)} | self.edited
        return {r: rank.instructions for r, rank in ranks.items()}


def mutate(program: Program, random_: random.Random) -> Mutant:
    """A program that differs from ``program`` in one thing."""
    if random_.random() < 0.2:
        what, changed = random_.choice(DATA_MUTATIONS)(program, random_)
        return Mutant(what, changed, {})
    stage = random_.randrange(len(program.stages))
    old = program.stages[stage].instructions
    name = random_.choice(list(LIST_MUTATIONS))
    new = LIST_MUTATIONS[name](list(old), program, random_)
    one_rank = random_.random() < 0.5
    differs = [k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    where = f"{name} at {differs[0] if differs else '-'} on stage {stage}"
    if one_rank:
        ranks = [r for r in range(program.world_size) if program.coordinates(r)["pp"] == stage]
        rank = random_.choice(ranks)
        return Mutant(f"{where}, rank {rank}", program, {rank: program.rank(rank).with_instructions(tuple(new))})
    return Mutant(where, with_stage(program, stage, instructions=tuple(new)), {})


def with_stage(program: Program, stage: int, **changes: Any) -> Program:
    stages = list(program.stages)
    stages[stage] = stages[stage].model_copy(update=changes)
    return program.model_copy(update={"stages": tuple(stages)})


def change(i: Instruction, **changes: Any) -> Instruction:
    return i.model_copy(update=changes)


# --- an instruction list ----------------------------------------------------------------------------------------------

Code = list[Instruction]


def pick(code: Code, r: random.Random, *ops: str) -> int | None:
    places = [k for k, i in enumerate(code) if not ops or i.op in ops]
    return r.choice(places) if places else None


def swap(code: Code, p: Program, r: random.Random) -> Code:
    a, b = r.randrange(len(code)), r.randrange(len(code))
    code[a], code[b] = code[b], code[a]
    return code


def swap_neighbours(code: Code, p: Program, r: random.Random) -> Code:
    a = r.randrange(len(code) - 1)
    code[a], code[a + 1] = code[a + 1], code[a]
    return code


def drop(code: Code, p: Program, r: random.Random) -> Code:
    del code[r.randrange(len(code))]
    return code


def duplicate(code: Code, p: Program, r: random.Random) -> Code:
    code.insert(r.randrange(len(code) + 1), r.choice(code))
    return code


def repeat(code: Code, p: Program, r: random.Random) -> Code:
    a = r.randrange(len(code))
    code.insert(a, code[a])
    return code


def move(code: Code, p: Program, r: random.Random) -> Code:
    i = code.pop(r.randrange(len(code)))
    code.insert(r.randrange(len(code) + 1), i)
    return code


def free_early(code: Code, p: Program, r: random.Random) -> Code:
    a = pick(code, r, "FREE")
    assert a is not None
    i = code.pop(a)
    code.insert(r.randrange(max(a - 4, 0), a + 1), i)
    return code


def edit(*ops: str) -> Any:
    """A mutation of one instruction among ``ops``."""

    def decorate(function: Any) -> Any:
        def mutation(code: Code, p: Program, r: random.Random) -> Code:
            a = pick(code, r, *ops)
            if a is not None:
                code[a] = change(code[a], **function(code[a], p, r))
            return code

        return mutation

    return decorate


@edit("SEND_F", "RECV_F", "SEND_B", "RECV_B")
def peer(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"peer": r.randrange(-1, len(p.stages) + 1)}


@edit("LOAD", "TOTAL_F", "RECV_F", "F", "SEND_F", "RECV_B", "B", "SEND_B", "FREE")
def microbatch(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"microbatch": r.randrange(p.num_microbatches + 1)}


@edit("F", "B", "I", "W")
def calls(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    assert i.calls is not None
    a, b = i.calls
    return {"calls": r.choice([(a + 1, b), (a, b - 1), (a - 1, b), (a, b + 1), (0, b), (a, a)])}


@edit("REDUCE", "SCATTER", "GATHER")
def bucket(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"bucket": r.randrange(4)}


@edit("TOTAL")
def axes(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"axes": tuple(r.sample(AXES, r.randrange(3)))}


@edit("SCATTER", "GATHER")
def level(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    axes = r.choice([("dp_shard",), ("dp_replicate",), ("dp",), ("dp_replicate", "dp_shard"), ()])
    return r.choice(
        [{"axes": axes}, {"gradients": not i.gradients}, {"op": "GATHER" if i.op == "SCATTER" else "SCATTER"}]
    )


@edit("LOAD", "TOTAL_F", "TOTAL", "RECV_F", "SEND_F", "RECV_B", "SEND_B", "FREE")
def fewer_values(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    values = list(i.values)
    if values:
        values.pop(r.randrange(len(values)))
    return {"values": tuple(values)}


@edit("LOAD", "TOTAL_F", "TOTAL", "RECV_F", "SEND_F", "RECV_B", "SEND_B", "FREE")
def other_values(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    values = list(i.values)
    values[r.randrange(len(values))] = r.choice([*p.values, "nothing"])
    return {"values": tuple(values)}


@edit("RECV_F", "SEND_F", "RECV_B", "SEND_B")
def shuffled_values(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"values": tuple(reversed(i.values))}


@edit("SYNC")
def synced(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"states": tuple(r.sample(list(p.states), r.randrange(1, 3)))}


@edit()
def operation(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {
        "op": r.choice(["LOAD", "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "FREE", "REDUCE", "STEP"])
    }


@edit()
def stage_number(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"stage": r.randrange(len(p.stages) + 1)}


@edit("FREE")
def gradients(i: Instruction, p: Program, r: random.Random) -> dict[str, Any]:
    return {"gradients": not i.gradients}


LIST_MUTATIONS = {
    "swap": swap,
    "swap neighbours": swap_neighbours,
    "drop": drop,
    "duplicate": duplicate,
    "repeat": repeat,
    "move": move,
    "free early": free_early,
    "peer": peer,
    "microbatch": microbatch,
    "calls": calls,
    "bucket": bucket,
    "axes": axes,
    "level": level,
    "fewer values": fewer_values,
    "other values": other_values,
    "shuffled values": shuffled_values,
    "synced states": synced,
    "operation": operation,
    "stage": stage_number,
    "gradients": gradients,
}


# --- a program's data -------------------------------------------------------------------------------------------------


def value_data(p: Program, r: random.Random) -> tuple[str, Program]:
    name = r.choice(list(p.values))
    value = p.values[name]
    shape = list(value.shape)
    if shape:
        k = r.randrange(len(shape))
        shape[k] *= 2
    changes = r.choice(
        [
            {"shape": tuple(shape) if shape else (2,)},
            {"dtype": r.choice(["float64", "bfloat16", "int64"])},
            {"requires_grad": not value.requires_grad},
        ]
    )
    values = {**p.values, name: value.model_copy(update=changes)}
    return f"value {name}: {changes}", p.model_copy(update={"values": values})


def bucket_data(p: Program, r: random.Random) -> tuple[str, Program]:
    stages = [s for s, stage in enumerate(p.stages) if stage.buckets]
    if not stages:
        return value_data(p, r)
    s = r.choice(stages)
    buckets = list(p.stages[s].buckets)
    k = r.randrange(len(buckets))
    old = buckets[k]
    changes = r.choice(
        [
            {"axes": tuple(r.sample(AXES, r.randrange(3)))},
            {"states": old.states[1:]},
            {"states": (*old.states, r.choice(list(p.states)))},
            {"states": (*old.states[:-1], r.choice(list(p.states)))},
            {"levels": r.choice([(), (("dp",),), (("dp_shard",),), (("dp_shard",), ("dp_replicate",)), (("tp",),)])},
        ]
    )
    buckets[k] = old.model_copy(update=changes)
    return f"bucket {k} of stage {s}: {changes}", with_stage(p, s, buckets=tuple(buckets))


def state_data(p: Program, r: random.Random) -> tuple[str, Program]:
    name = r.choice(list(p.states))
    state = p.states[name]
    changes = r.choice(
        [
            {"shape": (*state.shape, 2)},
            {"dtype": "float64"},
            {"layout": r.choice([x for x in ("R", "S0", "S1", "P", "R'") if x != state.layout])},
            {"stages": tuple(r.sample(range(len(p.stages) + 1), r.randrange(3)))},
            {"grad_axes": tuple(r.sample(AXES, r.randrange(3)))},
        ]
    )
    states = {**p.states, name: state.model_copy(update=changes)}
    return f"state {name}: {changes}", p.model_copy(update={"states": states})


def collective_data(p: Program, r: random.Random) -> tuple[str, Program]:
    """Another axis or number of ranks for a collective inside a graph, or the collective left out."""
    graph = p.blocks["layer"]
    nodes = [dict(n) for n in graph.nodes]
    found = [n for n in nodes if str(n.get("target", "")).startswith("partition.")]
    node = r.choice(found)
    kind = r.choice(["axis", "size", "left out"])
    if kind == "axis":
        node["args"] = [r.choice(AXES) if isinstance(a, str) and a == "tp" else a for a in node["args"]]
    elif kind == "size":
        node["args"] = [a * 2 if isinstance(a, int) else a for a in node["args"]]
    else:
        node.update(target="aten.mul.Tensor", args=[node["args"][0], 1.0])
    blocks = {**p.blocks, "layer": graph.model_copy(update={"nodes": tuple(nodes)})}
    return f"collective {node['name']}: {kind}", p.model_copy(update={"blocks": blocks})


def batch_data(p: Program, r: random.Random) -> tuple[str, Program]:
    if r.random() < 0.5:
        inputs = list(p.inputs)
        k = r.randrange(len(inputs))
        changes: dict[str, Any] = r.choice(
            [{"shape": (3, 4)}, {"batch_dim": 1}, {"batch_dim": None}, {"dtype": "int64"}]
        )
        inputs[k] = inputs[k].model_copy(update=changes)
        return f"input {k}: {changes}", p.model_copy(update={"inputs": tuple(inputs)})
    outputs = list(p.outputs)
    k = r.randrange(len(outputs))
    changes = r.choice([{"batch": "R"}, {"batch": "S7"}, {"stage": None}, {"layout": "S0"}])
    outputs[k] = outputs[k].model_copy(update=changes)
    return f"output {k}: {changes}", p.model_copy(update={"outputs": tuple(outputs)})


DATA_MUTATIONS = [value_data, bucket_data, state_data, collective_data, batch_data]
