"""Hashes that are kept: the same as found anew, and not taken to other processes."""

import pickle
from dataclasses import dataclass, replace

from partitioner.passes.ir.hashing import hashed_once
from partitioner.passes.ir.layouts import REPLICATED, make_shard_layout


@hashed_once
@dataclass(frozen=True)
class Named:
    name: str
    size: int = 1


def test_equal_ones_have_equal_hashes():
    first, other = Named("a", 2), Named("a", 2)
    assert first == other and hash(first) == hash(other) == hash(first)
    assert {first: "found"}[other] == "found"
    assert hash(replace(first, size=3)) == hash(Named("a", 3)) != hash(first)


def test_a_hash_stays_in_its_process():
    known = make_shard_layout(1, (2, 4))
    hash(known)
    for again in (pickle.loads(pickle.dumps(known)), pickle.loads(pickle.dumps(REPLICATED))):
        assert vars(again) == {name: vars(again)[name] for name in ("kind", "dim", "sections", "zigzag")}
    assert pickle.loads(pickle.dumps(known)) == known and known in {pickle.loads(pickle.dumps(known))}
