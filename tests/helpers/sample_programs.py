"""Believable programs made by hand, for the tests of pictures and text: a Llama-like model over a pipeline."""

from __future__ import annotations

from typing import Any

from partitioner.constraints import Constraints
from partitioner.plan import Baseline, Candidate, Certificate, Estimate, OperatorShare, Plan
from partitioner.runtime.program.buckets import Bucket
from partitioner.runtime.program.instructions import Instruction
from partitioner.runtime.program.mesh import AXES
from partitioner.runtime.program.program import (
    BlockGraph,
    CallData,
    InputData,
    OutputData,
    Program,
    Stage,
    StateData,
    Value,
)
from partitioner.topology import Topology

BF16 = "bfloat16"


class Nodes:
    """Serialised graph nodes, one call each."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def placeholder(self, name: str, shape: list[int], dtype: str = BF16) -> str:
        self.data.append({"name": name, "op": "placeholder", "val": [shape, dtype]})
        return name

    def call(self, target: str, *args: Any, shape: list[int], dtype: str = BF16, path: str = "") -> str:
        name = f"{target.split('.')[1]}_{len(self.data)}"
        written = [{"node": a} if isinstance(a, str) and any(d["name"] == a for d in self.data) else a for a in args]
        node = {"name": name, "op": "call_function", "target": target, "args": written, "val": [shape, dtype]}
        kwargs = {"kwargs": {"dtype": {"dtype": dtype}}} if target == "aten._to_copy.default" else {}
        self.data.append(node | kwargs | ({"path": path} if path else {}))
        return name

    def output(self, *names: str) -> tuple[dict[str, Any], ...]:
        self.data.append({"name": "output", "op": "output", "args": [{"node": n} for n in names]})
        return tuple(self.data)


def layer_block(b: int, s: int, h: int, f: int, tp: int) -> BlockGraph:
    """A decoder layer as one rank of ``tp`` runs it: sequence-sharded between the layers, Megatron inside."""
    n = Nodes()
    states = {
        "norm1": [h],
        "q": [h // tp, h],
        "o": [h, h // tp],
        "norm2": [h],
        "up": [f // tp, h],
        "down": [h, f // tp],
    }
    for name, shape in states.items():
        n.placeholder(name, shape)
    x = n.placeholder("x", [b, s // tp, h])
    cos = n.placeholder("cos", [1, s, 1])

    def gather(value: str) -> str:
        if tp == 1:
            return value
        return n.call("partition.all_gather.default", value, 1, "tp", tp, "reduce", shape=[b, s, h], path="self_attn")

    def scatter(value: str) -> str:
        if tp == 1:
            return value
        return n.call("partition.reduce_scatter.default", value, 1, "tp", tp, shape=[b, s // tp, h], path="mlp")

    y = gather(n.call("aten.mul.Tensor", x, "norm1", shape=[b, s // tp, h]))
    y = n.call("aten.linear.default", y, "q", shape=[b, s, h // tp])
    y = n.call("aten.mul.Tensor", y, cos, shape=[b, s, h // tp])
    y = scatter(n.call("aten.linear.default", y, "o", shape=[b, s, h]))
    x = n.call("aten.add.Tensor", x, y, shape=[b, s // tp, h])
    y = gather(n.call("aten.mul.Tensor", x, "norm2", shape=[b, s // tp, h]))
    y = n.call("aten.linear.default", y, "up", shape=[b, s, f // tp])
    y = scatter(n.call("aten.linear.default", y, "down", shape=[b, s, h]))
    x = n.call("aten.add.Tensor", x, y, shape=[b, s // tp, h])
    return BlockGraph(nodes=n.output(x), states=tuple(states), inputs=("x", "cos"))


def embedding_block(b: int, s: int, h: int, v: int, tp: int) -> BlockGraph:
    n = Nodes()
    n.placeholder("weight", [v // tp, h])
    n.placeholder("ids", [b, s], "int64")
    y = n.call("aten.embedding.default", "weight", "ids", shape=[b, s, h])
    if tp > 1:
        y = n.call("partition.reduce_scatter.default", y, 1, "tp", tp, shape=[b, s // tp, h], path="embed_tokens")
    return BlockGraph(nodes=n.output(y), states=("weight",), inputs=("ids",))


def rotary_block(s: int) -> BlockGraph:
    n = Nodes()
    n.placeholder("ids", [1, s], "int64")
    y = n.call("aten.cos.default", "ids", shape=[1, s], dtype="float32")
    y = n.call("aten.unsqueeze.default", n.call("aten._to_copy.default", y, shape=[1, s]), 2, shape=[1, s, 1])
    return BlockGraph(nodes=n.output(y), states=(), inputs=("ids",))


def head_block(b: int, s: int, h: int, v: int, tp: int, skip: bool) -> BlockGraph:
    n = Nodes()
    n.placeholder("norm", [h])
    n.placeholder("weight", [v // tp, h])
    n.placeholder("x", [b, s // tp, h])
    n.placeholder("labels", [b, s], "int64")
    if skip:
        n.placeholder("embedded", [b, s // tp, h])
    y = n.call("aten.mul.Tensor", "x", "norm", shape=[b, s // tp, h])
    if skip:
        y = n.call("aten.add.Tensor", y, "embedded", shape=[b, s // tp, h])
    if tp > 1:
        y = n.call("partition.all_gather.default", y, 1, "tp", tp, "reduce", shape=[b, s, h], path="lm_head")
    y = n.call("aten.linear.default", y, "weight", shape=[b, s, v // tp])
    y = n.call("aten._to_copy.default", y, shape=[b, s, v // tp], dtype="float32")
    y = n.call("aten.logsumexp.default", y, [2], shape=[b, s], dtype="float32")
    if tp > 1:
        y = n.call("partition.all_reduce.default", y, "tp", tp, "copy", shape=[b, s], dtype="float32", path="loss")
    y = n.call("aten.mul.Tensor", y, "labels", shape=[b, s], dtype="float32")
    y = n.call("aten.sum.default", y, shape=[], dtype="float32")
    return BlockGraph(nodes=n.output(y), states=("norm", "weight"), inputs=("x", "labels", *["embedded"] * skip))


def llama(
    pp: int = 4,
    dp: int = 2,
    tp: int = 2,
    *,
    layers: int = 32,
    microbatches: int = 8,
    hidden: int = 4096,
    sequence: int = 4096,
    vocabulary: int = 128256,
    tied: bool = False,
    skip: bool = False,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> Program:
    """A Llama-like program. ``tied``: one embedding and head weight; ``skip``: the head also reads the embedding."""
    b, s, h, f = 1, sequence, hidden, 14336 * hidden // 4096
    states: dict[str, StateData] = {}
    values: dict[str, Value] = {}
    calls: list[list[CallData]] = [[] for _ in range(pp)]
    where: dict[str, set[int]] = {}

    def state(name: str, shape: list[int], layout: str, stage: int) -> str:
        where.setdefault(name, set()).add(stage)
        axes = ("dp",) if layout != "R'" else ("dp", "tp")
        states[name] = StateData(
            shape=tuple(shape),
            dtype=BF16,
            kind="parameter",
            requires_grad=True,
            layout=layout if tp > 1 else "R",
            stages=tuple(sorted(where[name])),
            grad_axes=axes,
            aliases=("lm_head.weight",) if tied and "embed" in name else (),
        )
        return name

    def value(name: str) -> str:
        values[name] = Value(shape=(b, s // tp, h), dtype=BF16, requires_grad=True, layout="S1" if tp > 1 else "R")
        return name

    embed = state("model.embed_tokens.weight", [vocabulary, h], "S0", 0)
    calls[0].append(
        CallData(
            block="Embedding", path="model.embed_tokens", states=(embed,), inputs=("input_ids",), outputs=(value("x0"),)
        )
    )
    for name in ("input_ids", "labels"):
        values[name] = Value(shape=(b, s), dtype="int64")
    values["cos"] = Value(shape=(1, s, 1), dtype=BF16)
    for stage in range(pp):
        calls[stage].append(
            CallData(block="RotaryEmbedding", path="model.rotary_emb", inputs=("input_ids",), outputs=("cos",))
        )
    shapes = {
        "input_layernorm.weight": ([h], "R'"),
        "self_attn.q_proj.weight": ([h, h], "S0"),
        "self_attn.o_proj.weight": ([h, h], "S1"),
        "post_attention_layernorm.weight": ([h], "R'"),
        "mlp.up_proj.weight": ([f, h], "S0"),
        "mlp.down_proj.weight": ([h, f], "S1"),
    }
    for i in range(layers):
        stage = i * pp // layers
        names = tuple(state(f"model.layers.{i}.{k}", shape, layout, stage) for k, (shape, layout) in shapes.items())
        calls[stage].append(
            CallData(
                block="DecoderLayer",
                path=f"model.layers.{i}",
                states=names,
                inputs=(f"x{i}", "cos"),
                outputs=(value(f"x{i + 1}"),),
            )
        )
    last = pp - 1
    weight = (
        state("model.embed_tokens.weight", [vocabulary, h], "S0", last)
        if tied
        else state("lm_head.weight", [vocabulary, h], "S0", last)
    )
    values["loss"] = Value(shape=(), dtype="float32", requires_grad=True)
    head = (f"x{layers}", "labels") + (("x0",) if skip else ())
    calls[last].append(
        CallData(
            block="Head",
            path="lm_head",
            states=(state("model.norm.weight", [h], "R'", last), weight),
            inputs=head,
            outputs=("loss",),
        )
    )
    crossing = {i: (f"x{(i * layers + pp - 1) // pp}",) + (("x0",) if skip and i > 0 else ()) for i in range(1, pp)}
    if skip and pp > 1:
        crossing = {i: tuple(dict.fromkeys((*v, "x0"))) for i, v in crossing.items()}
    stages = []
    for i in range(pp):
        trainable = tuple(n for n, st in states.items() if i in st.stages)
        buckets = tuple(
            Bucket(states=tuple(n for n in trainable if states[n].grad_axes == axes), axes=axes)
            for axes in (("dp",), ("dp", "tp"))
            if any(states[n].grad_axes == axes for n in trainable)
        )
        program = list(_one_f_one_b(i, pp, microbatches, len(calls[i]), crossing))
        program += [Instruction(op="REDUCE", stage=i, bucket=k) for k in range(len(buckets))]
        if tied and i in (0, last) and pp > 1:
            program.append(Instruction(op="SYNC", stage=i, states=("model.embed_tokens.weight",), axes=("pp",)))
        program.append(Instruction(op="STEP", stage=i))
        stages.append(
            Stage(
                calls=tuple(calls[i]),
                instructions=tuple(program),
                buckets=buckets,
                checkpoint_calls=tuple(k for k, c in enumerate(calls[i]) if recompute and c.block == "DecoderLayer"),
            )
        )
    mesh = {a: {"pp": pp, "dp": dp, "tp": tp}.get(a, 1) for a in AXES}
    return Program(
        mesh=mesh,
        objective="train",
        num_microbatches=microbatches,
        schedule=schedule,
        blocks={
            "Embedding": embedding_block(b, s, h, vocabulary, tp),
            "RotaryEmbedding": rotary_block(s),
            "DecoderLayer": layer_block(b, s, h, f, tp),
            "Head": head_block(b, s, h, vocabulary, tp, skip),
        },
        states=states,
        values=values,
        inputs=tuple(
            InputData(value=n, path=n, shape=(dp * microbatches * b, s), dtype="int64") for n in ("input_ids", "labels")
        ),
        outputs=(OutputData(path="loss", value="loss", batch="P", stage=last),),
        loss="loss",
        stages=tuple(stages),
        fingerprint="0" * 32,
    )


def _one_f_one_b(stage: int, pp: int, m: int, calls: int, crossing: dict[int, tuple[str, ...]]) -> list[Instruction]:
    made: list[Instruction] = []

    def forward(i: int) -> None:
        inputs = ("input_ids", "labels") if stage == pp - 1 else ("input_ids",)
        made.append(Instruction(op="LOAD", stage=stage, microbatch=i, values=inputs))
        if stage:
            made.append(Instruction(op="RECV_F", stage=stage, microbatch=i, values=crossing[stage], peer=stage - 1))
        made.append(Instruction(op="F", stage=stage, microbatch=i, calls=(0, calls)))
        if stage < pp - 1:
            made.append(Instruction(op="SEND_F", stage=stage, microbatch=i, values=crossing[stage + 1], peer=stage + 1))

    def backward(i: int) -> None:
        if stage < pp - 1:
            made.append(Instruction(op="RECV_B", stage=stage, microbatch=i, values=crossing[stage + 1], peer=stage + 1))
        made.append(Instruction(op="B", stage=stage, microbatch=i, calls=(0, calls)))
        if stage:
            made.append(Instruction(op="SEND_B", stage=stage, microbatch=i, values=crossing[stage], peer=stage - 1))

    warm = min(m, pp - 1 - stage)
    for i in range(warm):
        forward(i)
    for i in range(m - warm):
        forward(warm + i)
        backward(i)
    for i in range(m - warm, m):
        backward(i)
    return made


def plan_of(program: Program, model: str = "LlamaForCausalLM", notes: tuple[str, ...] = ()) -> Plan:
    """A plan around ``program``, with figures that a search could have found."""
    nodes = max(1, program.world_size // 8)
    topology = Topology.preset("dgx-h100", nodes)
    per_stage = program.world_size // len(program.stages)
    memory = tuple(int((61 - 3 * (rank // per_stage)) * 2**30) for rank in range(program.world_size))
    mesh = dict(program.mesh)
    data = {axis: program.world_size if axis == "dp" else 1 for axis in mesh}
    megatron = {**mesh, "tp": min(8, program.world_size), "pp": 1, "dp": max(1, program.world_size // 8)}
    one = {"microbatch_size": 1, "schedule": "1f1b"}
    candidates = (
        Candidate(mesh=mesh, **one, status="chosen", bound=1.2, step_time=1.234, memory=memory[0]),
        Candidate(mesh=megatron, **one, status="solved", bound=1.3, step_time=1.5, memory=60 * 2**30),
        Candidate(mesh={**mesh, "dp": 1, "tp": 8}, microbatch_size=2, schedule="gpipe", status="bounded", bound=1.9),
        Candidate(mesh=data, **one, status="infeasible", memory=120 * 2**30, missing=43 * 2**30,
                  reason="stage 0 lacks 43 GiB"),
    )  # fmt: skip
    return Plan(
        program=program,
        topology=topology,
        devices=tuple(range(program.world_size)),
        constraints=Constraints(),
        estimate=Estimate(
            step_time=1.234, mfu=0.431, bubble=0.112, memory=memory,
            breakdown={"compute": 0.87, "bubble": 0.138, "tp_communication": 0.19, "pp_communication": 0.036},
        ),
        certificate=Certificate(
            objective=1.234, bound=1.2, gap=0.0276, candidates=candidates,
            baselines=(
                Baseline(name="Plain data parallelism", candidate=candidates[3]),
                Baseline(name="Megatron's layout", candidate=candidates[1], excluded="excluded by the constraints"),
            ),
            beyond={
                "tp": "Wider tp was not tried.", "schedule": "The proof covers the pipeline schedules 1F1B and ZB-1P.",
            },
        ),
        shares=OperatorShare(matmul_sharded=0.987, without_rule={"aten.sort.stable": 0.004}),
        model=model,
        precision="bf16",
        notes=notes,
    )  # fmt: skip
