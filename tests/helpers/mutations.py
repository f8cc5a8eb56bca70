"""Random small damage to a valid program (to one rank's list, to that of a whole stage, to its data), and to files of
several syntaxes; a guard that notices what a reader of a file must not do."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

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


HOSTILE_OPERATORS = [
    "aten.from_file.default",
    "aten.from_file.out",
    "aten.set_.source_Storage",
    "aten._cufft_set_plan_cache_max_size.default",
    "aten.record_stream.default",
    "aten._print.default",
    "prim.Print.default",
    "aten.resize_.default",
    "profiler._record_function_enter_new.default",
    "c10d.broadcast_.default",
    "_c10d_functional.all_reduce.default",
    "mylib.run.default",
    "os.system",
    "__class__.__init__.__globals__",
    "partition.nothing.default",
    "",
]
_ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, -(2**70), 10**400, 1e308, 0.5, math.nan, math.inf, -math.inf, "",
    "x", "1", "nan", "10**9", "../../../../etc/passwd", "/dev/zero", "a/../b", "\x00", "\ud7ff é", "y" * 100_000,
    "'; import os; os.system('true') #", [], {}, [[]], [None], {"a": 1}, {"": {}}, [-1], ["x", 1], {"node": "x"},
    {"layout": "load"}, {"dtype": "Tensor"}, {"slice": [1, 2, 3]}, {"float": "x"}, {"=": 1}, *HOSTILE_OPERATORS,
]  # fmt: skip
_BOMB = "x0: &x0 [1, 1]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 40))
_WORDS = {
    "yaml": [
        'zz: !!python/object/apply:os.system ["true"]\n',
        "zz: !!python/name:os.system\n",
        "zz: &a [*a]\n",
        "zz: &a {b: *a}\n",
        "zz: *unknown\n",
        "zz: !!set {a, b}\n",
        "zz: !!binary x\n",
        "zz: 9999-99-99\n",
        "zz: !!timestamp x\n",
        "zz: 0x" + "f" * 5000 + "\n",
        "? [a, b]\n: 1\n",
        "<<: 3\n",
        "---\n",
        "\t",
        _BOMB,
        _BOMB + "nodes: *x39\nfsdp_config: *x39\nmodel: *x39\n",
    ],
    "python": [
        "import os\nos.system('true')\n",
        "def zz() -> Trainer.Config:\n    return zz()\n",
        "".join(f"def f{i}() -> int:\n    return X.Config(a=f{i + 1}(), b=f{i + 1}())\n" for i in range(40))
        + "def f40() -> Trainer.Config:\n    return f0()\n",
        "x = " + "(" * 5000 + "\n",
        "x = " + "-" * 5000 + "1\n",
        "x = " + "a." * 3000 + "b\n",
        "x = 9 ** 9 ** 9 ** 9\n",
        "    config = base()\n    config.a = config\n",
    ],
    "shell": [
        " $(true) ",
        " `true` ",
        "\nsource /dev/zero\n",
        "\nA=$B$B\nB=$A$A\nexport A\n",
        "\n" + "".join(f"A{i}=$A{i + 1}$A{i + 1}\n" for i in range(40)) + "X=$A0\n--num-layers $A0 ",
        "\n" + "".join(f"A{i}=$A{i - 1}$A{i - 1}\n" for i in range(40)) + "--num-layers $A39 ",
        " --num-layers " + "9" * 5000 + " ",
        " --num-layers ${X:-${X:-${X:-1}}} ",
        ' "',
        " --spec a.b.c ",
        " --yaml-cfg /dev/zero ",
    ],
    "json": ['{"a": 1, "a": 2}', "[" * 100_000, '{"a":' * 5000, "9" * 5000, "NaN", "1e999", "\ufeff", '"\\ud800"'],
    "csv": ["0F0", "B", "9" * 5000, '"', "0F" + "9" * 30, "-1", ",,,,", "0F0" * 5000, "\n\n"],
}
_WORDS["toml"] = ["a = " + "[" * 5000, "a.b.c = 1\na.b = 2\n", "[a]\n[a]\n", "d = 1979-99-01\n", "n = " + "9" * 5000]


class ReaderTooSlow(BaseException):
    """Raised in a reader that has computed for too long. It is no ``Exception``, so that no reader catches it."""


class ForbiddenAction(AssertionError):
    """Raised if a reader of a file starts a process, writes a file, opens a connection or runs code of the file."""


_ACTIONS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect", "os.remove",
    "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "ctypes.dlopen",
)  # fmt: skip
_guarded: list[str] | None = None


def _note_action(event: str, arguments: tuple[Any, ...]) -> None:
    """Note an action of the process if it is forbidden now. Python calls it (``sys.addaudithook``)."""
    if _guarded is None:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    runs = event == "exec" and getattr(arguments[0], "co_filename", "<").startswith("<")
    if event in _ACTIONS or writes or (runs and not _is_in_import()):
        _guarded.append(f"{event}{arguments!r}"[:200])
        raise ForbiddenAction(_guarded[-1])


def _is_in_import() -> bool:
    """Return whether a module of an installed package is being imported, which may make classes by ``exec``."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def guarded_reading(seconds: float) -> Iterator[None]:
    """Return a context in which a file is read: it raises :class:`ForbiddenAction` for processes, connections, code of
    the file and writes, even if the reader catches the error, and :class:`ReaderTooSlow` after ``seconds`` of processor
    time.
    """
    global _guarded
    if not _is_hooked:
        sys.addaudithook(_note_action)
        _is_hooked.append(True)

    def stop(*_: object) -> None:
        raise ReaderTooSlow(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _guarded = found = []
    try:
        yield
    finally:
        _guarded = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if found:
        raise ForbiddenAction(found[0])


_is_hooked: list[bool] = []


def mutate_tree(tree: Any, draw: random.Random) -> Any:
    """Return a copy of ``tree`` (dicts, lists, numbers, texts) with one to three random changes."""
    whole = [copy.deepcopy(tree)]
    for _ in range(draw.randint(1, 3)):
        holder, key = _choose_place(whole, draw)
        kind = draw.choice(["odd", "odd", "odd", "drop", "rename", "copy", "double", "nest", "text"])
        value = holder[key]
        if kind == "drop" and holder is not whole:
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw.choice([f"{key}x", "", str(key).upper(), "__class__", key])] = holder.pop(key)
        elif kind == "copy":
            other, there = _choose_place(whole, draw)
            holder[key] = copy.deepcopy(other[there])
        elif kind == "double" and isinstance(value, list):
            holder[key] = [*value, *copy.deepcopy(value)]
        elif kind == "nest":
            for _ in range(draw.choice([1, 2, 300])):
                value = draw.choice([[value], {"a": value}])
            holder[key] = value
        elif kind == "text" and not isinstance(value, dict | list):
            holder[key] = str(value) if not isinstance(value, str) else draw.choice([value[:-1], value + "x", 7])
        else:
            holder[key] = copy.deepcopy(draw.choice(_ODD))
    return whole[0]


def _choose_place(whole: list[Any], draw: random.Random) -> tuple[Any, Any]:
    """Return a random container inside ``whole``, and a key or an index of it; deep places are as likely as others."""
    holder, key = whole, 0
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.85:
        holder = holder[key]
        keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw.choice(keys)
    return holder, key


def mutate_bytes(content: bytes, syntax: str, draw: random.Random) -> bytes:
    """Return ``content`` with a random change of its bytes: cut off, replaced, doubled, not UTF-8, or with words
    inserted that are dangerous in the ``syntax``, such as ``yaml``.
    """
    place = draw.randrange(len(content) + 1)
    kinds = ["cut", "byte", "utf"]
    kind = draw.choice([*kinds, "line", "word", "word", "word"] if syntax in _WORDS else kinds)
    if kind == "cut":
        return content[:place]
    if kind == "byte":
        return content[:place] + bytes([draw.randrange(256)]) + content[place + draw.randint(0, 1) :]
    if kind == "utf":
        return content[:place] + draw.choice([b"\xff\xfe", b"\xc3\x28", b"\x00", b"\xed\xa0\x80"]) + content[place:]
    lines = content.splitlines(keepends=True) or [b""]
    at = draw.randrange(len(lines) + 1)
    if kind == "line":
        return b"".join([*lines[:at], draw.choice(lines), *lines[at:]])
    word = draw.choice(_WORDS[syntax]).encode("utf-8", "surrogatepass")
    if draw.random() < 0.5:
        return b"".join([*lines[:at], word, *lines[at:]])
    return draw.choice([word, content[:place] + word + content[place:], content + b"\n" + word])


def write_syntax(tree: Any, syntax: str) -> bytes:
    """Return ``tree`` as text in the ``syntax`` ``json`` or ``yaml``."""
    if syntax == "yaml":
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    return json.dumps(tree).encode("utf-8", "surrogatepass")
