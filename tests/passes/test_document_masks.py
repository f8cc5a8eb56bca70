"""Attention within documents: the operator beside dense attention, and the masks that are recognised as documents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

from partitioner.passes.capture.capture import capture
from partitioner.passes.errors import UnsupportedError
from partitioner.passes.ir.interpret import run_graph
from partitioner.passes.ir.layouts import join_shards, make_shard_layout, take_shard
from partitioner.passes.normalize.document_masks import list_document_attentions, set_document_lengths
from partitioner.passes.normalize.pipeline import normalize
from partitioner.passes.ops import documents
from partitioner.passes.ops.attention import Band, count_max_pairs
from partitioner.passes.ops.documents import count_document_pairs
from partitioner.runtime.comm.thread_backend import ThreadWorld
from partitioner.runtime.execute.collective_ops import ContextDocumentAttention
from tests.example_counts import examples
from tests.helpers.attention.packed_models import BY_POSITIONS, NOTATIONS
from tests.helpers.normal_forms import assert_same, normal_form, numbers, operators

LIMITS = st.one_of(st.none(), st.integers(0, 9))
LENGTH, ROWS = 24, 2


# --- the operator -----------------------------------------------------------------------------------------------------


def _dense(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, band: Band, scale: float | None) -> Tensor:
    """The same from a whole matrix of scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (ids[:, :, None] == ids[:, None, :])[:, None]
    seen = seen & (distance <= (q.shape[2] if band.before is None else band.before))
    seen = seen & (distance >= (-q.shape[2] if band.after is None else -band.after))
    scores = (q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, -1e300)
    return scores.softmax(-1) @ v


def _tensors(length: int, heads: tuple[int, int], seed: int, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, n, length, d) for n, d in ((heads[0], 4), (heads[1], 4), (heads[1], width), (heads[0], width))]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def _ids(length: int, seed: int, kind: str) -> Tensor:
    """Ids in order, in any order (documents of several pieces), or equal in all rows."""
    ids = torch.randint(-2, 4, (ROWS, length), generator=torch.Generator().manual_seed(seed))
    return ids if kind == "any" else ids.sort(1).values if kind == "ordered" else ids[:1].repeat(ROWS, 1)


def _expected(ids: Tensor, band: Band, scale: float | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = _dense(*leaves, ids, band, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def _assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.integers(0, 99),
    st.sampled_from(["ordered", "any", "equal"]),
    LIMITS,
    LIMITS,
    st.sampled_from([(4, 4), (4, 2), (2, 1)]),
    st.sampled_from([None, 0.3]),
    st.sampled_from([4, 6]),
)
def test_tiles_of_documents_are_attention_within_documents(
    length: int, seed: int, kind: str, before: Any, after: Any, heads: tuple[int, int], scale: float | None, width: int
):
    tensors, ids, band = _tensors(length, heads, seed, width), _ids(length, seed, kind), Band(before, after)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    limits = [-1 if limit is None else limit for limit in band]
    out, _ = torch.ops.partition.document_attention(*leaves, ids, [], *limits, scale)
    found = [out, *torch.autograd.grad(out, leaves, tensors[3])]
    _assert_close(found, _expected(ids, band, scale, tensors))


@settings(max_examples=40)
@given(
    st.integers(2, 4),
    st.booleans(),
    st.sampled_from(["ring", "all_gather"]),
    st.sampled_from(["ordered", "any", "equal"]),
    LIMITS,
    LIMITS,
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_ranks_that_share_a_sequence_exchange_documents(
    num_ranks: int, zigzag: bool, algorithm: str, kind: str, before: Any, after: Any, each: int, seed: int
):
    length, band = 2 * num_ranks * each, Band(before, after)
    tensors, ids = _tensors(length, (4, 2), seed), _ids(length, seed, kind)
    layout, of_ids = make_shard_layout(2, (), zigzag), make_shard_layout(1, (), zigzag)
    world, found = ThreadWorld(num_ranks), dict[int, tuple[Tensor, ...]]()

    def work(rank: int) -> None:
        try:
            group = world.communicator(rank).group(tuple(range(num_ranks)))
            attention = ContextDocumentAttention(group, band, None, zigzag, algorithm)
            q, k, v, grad = (take_shard(x, layout, num_ranks, rank) for x in tensors)
            own = take_shard(ids, of_ids, num_ranks, rank)
            out, lse = attention.forward(q, k, v, own)
            found[rank] = (out, *attention.backward(grad, q, k, v, own, out, lse))
        except Exception as error:
            world.abort(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine = [join_shards([found[r][i] for r in range(num_ranks)], layout) for i in range(4)]
    _assert_close(mine, _expected(ids, band, None, tensors))


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(0, 99), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_pairs_of_ids_are_numbered_by_their_first_positions(length: int, seed: int, dtype: torch.dtype, large: bool):
    """So that numbers of a shorter row are those of its first positions."""
    generator = torch.Generator().manual_seed(seed)
    ids, other = (torch.randint(-2, 3, (ROWS, length), generator=generator).to(dtype) for _ in range(2))
    if large:  # products and sums of such ids would overflow
        ids, other = ids * (torch.iinfo(dtype).max // 2), torch.iinfo(dtype).min - ids
    found = torch.ops.partition.combine_ids(ids, other)
    same = (ids[:, :, None] == ids[:, None, :]) & (other[:, :, None] == other[:, None, :])
    assert found.dtype is torch.int64 and torch.equal(found, same.long().argmax(2))
    part = torch.ops.partition.combine_ids(ids[:, : length // 2], other[:, : length // 2])
    assert torch.equal(part, found[:, : length // 2])


def test_no_work_and_no_tensor_grows_with_the_square_of_the_row():
    """A thousand documents of four positions: tiles have four queries and four keys."""
    ids = torch.arange(4096).div(4, rounding_mode="floor")[None]
    runs = documents.find_runs(ids, (documents.PositionRange(0, 4096, 0),))
    (tiles,) = documents.list_document_tiles(runs, runs, Band(None, 0))
    assert len(tiles) == 1024
    assert {(t.rows[1] - t.rows[0], t.keys[1] - t.keys[0]) for t in tiles} == {(4, 4)}


def _flash_by_documents(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, band: Band, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The contract of torch's flash kernel for sequences of different lengths: rows ``[t, h, d]``, lse ``[h, t]``."""
    outs, sums = [], []
    for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        rows = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        limits = [-1 if limit is None else limit for limit in band]
        out, lse = torch.ops.partition.band_attention(*rows, *limits, scale)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, 1)


def _window(is_causal: bool, left: int | None, right: int | None) -> Band:
    return Band(None, 0) if is_causal else Band(left, right)


@pytest.mark.parametrize("band", [Band(None, 0), Band(), Band(3, 0), Band(None, 2)])
def test_the_flash_kernel_gets_documents_as_sequences(band: Band, monkeypatch: pytest.MonkeyPatch):
    """What CUDA runs, with a kernel of the same contract in place of torch's."""

    class Kernels:
        @staticmethod
        def _flash_attention_forward(
            q: Tensor, k: Tensor, v: Tensor, starts: Tensor, others: Tensor, most: int, more: int, dropout: float,
            causal: bool, debug: bool, *, scale: float | None, window_size_left: int | None = None,
            window_size_right: int | None = None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            assert most == more == int(starts.diff().max()) and dropout == 0.0 and not debug
            seen = _window(causal, window_size_left, window_size_right)
            return *_flash_by_documents(q, k, v, starts, seen, scale), q, q, q

        @staticmethod
        def _flash_attention_backward(
            grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, others: Tensor,
            most: int, more: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float | None,
            window_size_left: int | None = None, window_size_right: int | None = None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            seen = _window(causal, window_size_left, window_size_right)
            again, sums = _flash_by_documents(*leaves, starts, seen, scale)
            torch.testing.assert_close(again, out)
            torch.testing.assert_close(sums, lse)
            return torch.autograd.grad(again, leaves, grad)

    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 7, 7, 7]])
    tensors = _tensors(10, (4, 2), 0)
    q, k, v, grad = tensors
    limits = [-1 if limit is None else limit for limit in band]
    monkeypatch.setattr(documents, "has_flash", lambda *_: True)
    monkeypatch.setattr(documents, "aten", Kernels)
    out, lse = documents.document_attention(q, k, v, ids, [], *limits, None)
    back = documents.document_attention_backward(grad, q, k, v, ids, out, lse, limits, None)
    _assert_close([out, *back], _expected(ids, band, None, tensors))


# --- recognition ------------------------------------------------------------------------------------------------------


def _operands(heads: int = 4, kv: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (numbers(ROWS, n, length, 4, seed=i) for i, n in enumerate((heads, kv, kv)))
    return q, k, v


def _packed_ids() -> Tensor:
    return torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 11 + [1] + [2] * 12])


def _restart(ids: Tensor) -> Tensor:
    return torch.stack([torch.cat([torch.arange(int(n)) for n in row.unique_consecutive(return_counts=True)[1]])
                        for row in ids])  # fmt: skip


def _attentions(function: Callable[..., object], *args: Tensor) -> list[str]:
    """The attentions of the normal form, whose results are those of ``function``; no mask is left beside documents."""
    found = [name for name in assert_same(function, *args) if "attention" in name]
    if all("document" in name for name in found):
        shapes = [
            n.meta["val"].shape for n in normal_form(function, *args).graph.nodes if hasattr(n.meta.get("val"), "shape")
        ]
        assert not any(tuple(s[-2:]) == (LENGTH, LENGTH) for s in shapes)
    return found


DOCUMENTS, MASKED = ["partition.document_attention.default"], ["scaled_dot_product_attention.default"]


@pytest.mark.parametrize("name", NOTATIONS)
def test_notations_of_documents(name: str):
    ids = _packed_ids()
    data = _restart(ids) if name in BY_POSITIONS else ids
    assert _attentions(lambda *x: 2 * NOTATIONS[name](*x), *_operands(), data) == DOCUMENTS


def _by_mask(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, *data: 2 * F.scaled_dot_product_attention(q, k, v, mask(*data), enable_gqa=True)


def _pairs(ids: Tensor) -> Tensor:
    return (ids.unsqueeze(-1) == ids.unsqueeze(-2)).unsqueeze(-3)


def _causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


CUMULATED = torch.tensor([0, 5, 14, LENGTH], dtype=torch.int32)
IDS = _packed_ids()
PLACE = torch.arange(LENGTH)

RESTARTED = _restart(IDS)
STARTS = torch.tensor([[0, 5, 14], [0, 11, 12]])  # first positions of the documents of IDS

# Documents whose ids are computed, are the same for all rows, or have dims in another order.
SOURCES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "starts": (lambda p: _pairs((p == 0).cumsum(1)) & _causal(), (_restart(IDS),)),
    "search": (lambda c: _pairs(torch.searchsorted(c, PLACE, right=True)) & _causal(), (CUMULATED,)),
    "buckets": (lambda c: _pairs(torch.bucketize(PLACE, c, right=True)) & _causal(), (CUMULATED,)),
    "counted": (lambda c: _pairs((PLACE[:, None] >= c).sum(1)) & _causal(), (CUMULATED,)),
    "one row": (lambda i: _pairs(i) & _causal(), (IDS[0],)),
    "batch of one": (lambda i: _pairs(i) & _causal(), (IDS[:1],)),
    "positions first": (lambda i: _pairs(i.t()) & _causal(), (IDS.t().contiguous(),)),
    "short integers": (lambda i: _pairs(i) & _causal(), (IDS.int(),)),
    "shifted alike": (lambda i: _pairs(i + 3) & _causal(), (IDS,)),
    "all but the last": (lambda i: _pairs(i[:, :-1]) & _causal(), (F.pad(IDS, (0, 1), value=9),)),
    "all but the first": (lambda i: _pairs(i[:, 1:]) & _causal(), (F.pad(IDS, (1, 0), value=9),)),
    "marks": (lambda c: _pairs(torch.zeros(LENGTH + 1).long().scatter(0, c, 1).cumsum(0)[:-1]) & _causal(),
              (CUMULATED.long(),)),
    "lengths": (lambda n: _pairs(torch.repeat_interleave(torch.arange(3), n, output_size=LENGTH)) & _causal(),
                (CUMULATED.diff().long(),)),
    "places within": (lambda c: _within(_search(c), PLACE - c[_search(c)]), (CUMULATED.long(),)),
    "gathered starts": (lambda i, c: _within(i, PLACE - c.gather(1, i)), (IDS, STARTS)),
    "looked up pair by pair": (lambda c: _look_up_pairs(_search(c), c), (CUMULATED.long(),)),
    "computed twice": (lambda c: (_search(c)[:, None] == _search(c)) & _causal(), (CUMULATED.long(),)),
    "two names": (lambda i: _pairs(i) & _pairs(2 * i + 1) & _causal(), (IDS,)),
    "two kinds": (lambda i, j: _pairs(i) & _pairs(j), (IDS, IDS.flip(0))),
    "three kinds": (lambda i, j, p: _pairs(i) & _pairs(j) & _pairs(p // 5).tril(), (IDS, IDS.flip(0), RESTARTED)),
    "two kinds in dims of another order": (lambda i, j: _pairs(i) & _pairs(j.t()), (IDS, IDS.flip(0).t().contiguous())),
    "two kinds, one for all rows": (lambda i, j: _pairs(i) & _pairs(j), (IDS, IDS[1])),
    "two kinds, of which one is longer": (
        lambda i, j: _pairs(i) & _pairs(j[:, 1:]), (IDS, F.pad(IDS.flip(0), (1, 0), value=9))),
    "chunks": (lambda i, p: _pairs(i) & _pairs(p // 4) & _causal(), (IDS, RESTARTED)),
    "chunks of a query's and a key's position": (
        lambda i, p: _pairs(i) & (p[:, None, :, None] // 4 == p[:, None, None, :] // 4) & _causal(), (IDS, RESTARTED)),
    "chunks from floats": (lambda i, p: _pairs(i) & _compare(p, lambda x: (x / 4).floor().long()), (IDS, RESTARTED)),
    "remainders": (lambda i, p: _pairs(i) & _compare(p, lambda x: x % 3), (IDS, RESTARTED)),
    "chunks from a search": (
        lambda i, c: _pairs(i) & _compare(PLACE[None], lambda x: torch.bucketize(x, c)) & _causal(), (IDS, CUMULATED)),
    "chunks of places within": (lambda i, c: _chunk_places(i, c), (IDS, STARTS)),
    "chunks and an order": (
        lambda p: _pairs(_changes(p)) & _compare(p - torch.zeros(ROWS, 1).long(), lambda x: x // 4) & _order(p),
        (RESTARTED,)),
    "chunks of the row": (
        lambda i: _pairs(i) & _compare(PLACE, lambda x: (x + 3) // 5) & _causal(), (IDS,)),
    "chunks of the row in a window": (
        lambda i: _pairs(i) & (_compare(PLACE, lambda x: x // 5).tril() & (PLACE[:, None] - PLACE < 3)), (IDS,)),
    "chunks without documents": (lambda i: _compare(PLACE, lambda x: x // 5).tril(), (IDS,)),
    "chunks that see both ways": (lambda i: _compare(PLACE, lambda x: (x + 1) // 5), (IDS,)),
    "added chunks": (
        lambda i: torch.where(_compare(PLACE, lambda x: x // 5).tril(), 0.0, -torch.inf).double(), (IDS,)),
}  # fmt: skip


def _compare(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Whether ``function`` of ``x`` is the same for query and key, computed for each of them."""
    query, key = x.unsqueeze(-1), x.unsqueeze(-2)
    return (function(query) == function(key)).unsqueeze(-3)


def _chunk_places(ids: Tensor, starts: Tensor) -> Tensor:
    """Chunks of positions in documents, whose first positions are in a table."""
    row, query, key = torch.arange(ROWS)[:, None, None, None], PLACE[None, None, :, None], PLACE[None, None, None, :]
    places = [x - starts[row, ids[row, x]] for x in (query, key)]
    return (ids[row, query] == ids[row, key]) & (places[0] // 4 == places[1] // 4) & (places[0] >= places[1])


def test_lengths_without_a_size_are_refused_with_advice():
    def mask(lengths: Tensor) -> Tensor:
        ids = torch.repeat_interleave(torch.arange(3), lengths)
        return (ids[:, None] == ids) & _causal()

    with pytest.raises(UnsupportedError, match="the size of its result, such as the number of positions, as output_s"):
        normal_form(_by_mask(mask), *_operands(), CUMULATED.diff().long())


def _search(ends: Tensor) -> Tensor:
    return torch.bucketize(PLACE, ends[1:], right=True)


def _within(ids: Tensor, places: Tensor) -> Tensor:
    """A causal mask of positions in documents, ``places``."""
    return _pairs(ids) & (places.unsqueeze(-1) - places.unsqueeze(-2) >= 0).unsqueeze(-3)


def _look_up_pairs(ids: Tensor, starts: Tensor) -> Tensor:
    """As mask functions of a query's and a key's index do, whose conditions are for positions in a document."""
    query, key = PLACE[None, None, :, None], PLACE[None, None, None, :]
    distance = (query - starts[ids[query]]) - (key - starts[ids[key]])
    return (ids[query] == ids[key]) & (distance >= 0)


@pytest.mark.parametrize("name", SOURCES)
def test_any_integers_are_documents(name: str):
    mask, data = SOURCES[name]
    assert _attentions(_by_mask(mask), *_operands(), *data) == DOCUMENTS


def _order(p: Tensor) -> Tensor:
    return p[:, None, :, None] >= p[:, None, None, :]


def _changes(p: Tensor, by: int = 1) -> Tensor:
    return (torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != by).cumsum(-1)


OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "unproven order": (lambda i, p: _pairs(i) & _order(p), (IDS, _restart(IDS))),
    "steps of two": (lambda p: _pairs(_changes(p, 2)) & _order(p), (2 * _restart(IDS),)),
    "another order": (lambda p, o: _pairs(_changes(p)) & _order(o), (_restart(IDS), _restart(IDS))),
    "next document": (lambda i: (i[:, None, :, None] >= i[:, None, None, :] + 1) | torch.eye(LENGTH).bool(), (IDS,)),
    "either": (lambda i: _pairs(i) | _causal(), (IDS,)),
    "chunks of two sizes": (
        lambda i, p: _pairs(i) & (p[:, None, :, None] // 4 == p[:, None, None, :] // 5) | torch.eye(LENGTH).bool(),
        (IDS, RESTARTED)),
    "chunks of other positions": (
        lambda i, p, o: _pairs(i) & (p[:, None, :, None] // 4 == o[:, None, None, :] // 4) | torch.eye(LENGTH).bool(),
        (IDS, RESTARTED, RESTARTED)),
    "chunks of another row": (
        lambda i, p: _pairs(i) & (p[:, None, :, None] // 4 == p.flip(0)[:, None, None, :] // 4)
        | torch.eye(LENGTH).bool(), (IDS, RESTARTED)),
    "earlier chunks": (
        lambda i, p: _pairs(i) & (p[:, None, :, None] // 4 >= p[:, None, None, :] // 4), (IDS, RESTARTED)),
    "chunks of each head": (
        lambda i, p: _pairs(i) & _compare(p[:, None], lambda x: x // torch.tensor([2, 3, 4, 5])[:, None, None])[:, 0],
        (IDS, RESTARTED)),
    "another chunk": (
        lambda i: _pairs(i) & (~_compare(PLACE, lambda x: x // 4) | torch.eye(LENGTH).bool()), (IDS,)),
    "constant chunks of unequal size": (lambda i: _pairs(i) & _compare(PLACE, lambda x: (x * x) // 40), (IDS,)),
    "constant remainders": (lambda i: _pairs(i) & _compare(PLACE, lambda x: x % 4), (IDS,)),
    "chunks that overlap": (
        lambda i: _pairs(i) & (_compare(PLACE, lambda x: x // 4) | _compare(PLACE, lambda x: (x + 2) // 4)), (IDS,)),
    "reversed": (lambda i: (i[:, None, :, None] == i.flip(1)[:, None, None, :]) | torch.eye(LENGTH).bool(), (IDS,)),
    "starts of another row": (
        lambda i, c: _within(i, PLACE - c.flip(0).gather(1, i.flip(0))), (IDS, STARTS)),
    "starts by position": (lambda i, c: _within(i, c.gather(0, i % 2)), (IDS, torch.arange(LENGTH).repeat(2, 1))),
    "other row": (lambda i: (i[:, None, :, None] == i.flip(0)[:, None, None, :]) | torch.eye(LENGTH).bool(), (IDS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_of_data_stay(name: str):
    """They give the same numbers; no documents are read into them."""
    mask, data = OTHERS[name]
    assert _attentions(_by_mask(mask), *_operands(), *data) == MASKED


Atom = Callable[[Tensor, Tensor], Tensor]  # of ids and restarting positions

ATOMS: dict[str, Atom] = {
    "same": lambda i, p: _pairs(i),
    "changes": lambda i, p: _pairs(_changes(p)),
    "order": lambda i, p: _order(p),
    "near": lambda i, p: p[:, None, None, :] > p[:, None, :, None] - 3,
    "far": lambda i, p: p[:, None, None, :] + 2 < p[:, None, :, None],
    "shifted": lambda i, p: i[:, None, :, None] == i[:, None, None, :] + 1,
    "causal": lambda i, p: _causal(),
    "long": lambda i, p: PLACE[:, None] - PLACE < 4,
    "ahead": lambda i, p: PLACE[:, None] <= PLACE,
    "chunk": lambda i, p: _compare(p, lambda x: x // 4),
    "row chunk": lambda i, p: _compare(PLACE, lambda x: (x + 2) // 5),
    "other": lambda i, p: _pairs(i.flip(0)),
}
EXPRESSIONS = st.recursive(
    st.sampled_from(sorted(ATOMS)),
    lambda inner: st.one_of(
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.sampled_from(["not", "tril", "triu"]), inner),
    ),
    max_leaves=4,
)
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "boolean": lambda shown: shown,
    "filled": lambda shown: torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, -torch.inf),
    "scaled": lambda shown: (1 - shown.double()) * -1e9,
    "added": lambda shown: _add_causal(shown).double(),
    "log": lambda shown: shown.double().log(),
    "product": lambda shown: shown.double() * _causal().double() > 0.5,
    "assigned": lambda shown: (
        torch.full(shown.shape, -torch.inf).double().index_put((shown,), torch.zeros(()).double())
    ),
    "least": lambda shown: torch.minimum(torch.where(shown, 0.0, -1e30), torch.where(_causal(), 0.0, -1e9)).double(),
    "most": lambda shown: torch.maximum(torch.where(shown, 0.0, -1e30), torch.where(_causal(), 0.0, -1e9)).double(),
    "hidden by none": lambda shown: _add_causal(shown) == 0,
    "hidden by one": lambda shown: _add_causal(shown) > -1.5e9,
    "hidden by both": lambda shown: ~(_add_causal(shown) == -1e9),
}


def _add_causal(shown: Tensor) -> Tensor:
    """A sum of two additive masks, which is -2e9 where both hide a key."""
    return torch.where(shown, 0.0, -1e9) + torch.where(_causal(), 0.0, -1e9)


def _evaluate(expression: Any, ids: Tensor, positions: Tensor) -> Tensor:
    if isinstance(expression, str):
        return ATOMS[expression](ids, positions)
    kind, *parts = expression
    values = [_evaluate(part, ids, positions) for part in parts]
    if kind in ("tril", "triu"):
        return getattr(torch, kind)(values[0])
    return ~values[0] if kind == "not" else values[0] & values[1] if kind == "and" else values[0] | values[1]


@settings(max_examples=examples(120), derandomize=True)
@given(EXPRESSIONS, st.sampled_from(sorted(WRITTEN)), st.booleans())
def test_masks_of_any_expression_keep_their_meaning(expression: Any, written: str, restricted: bool):
    """Whether or not documents are recognised in it. Every query sees itself, so that no row is empty."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        shown = _evaluate(expression, ids, positions)
        shown = shown & _pairs(ids) if restricted else shown
        return 2 * F.scaled_dot_product_attention(q, k, v, WRITTEN[written](shown), enable_gqa=True)

    shown = _evaluate(expression, IDS, _restart(IDS)).expand(ROWS, 1, LENGTH, LENGTH)
    assume(bool(shown.diagonal(dim1=-2, dim2=-1).all()))
    _attentions(attend, *_operands(), IDS, _restart(IDS))


def test_masks_of_long_rows_are_not_created():
    length = 1 << 17
    with torch.device("meta"):
        ids, q = torch.zeros(1, length, dtype=torch.long), torch.zeros(1, 1, length, 1)

    def attend(q: Tensor, ids: Tensor) -> Tensor:
        place = torch.arange(length)
        return 2 * F.scaled_dot_product_attention(q, q, q, _pairs(ids) & (place[:, None] >= place))

    assert operators(normal_form(attend, q, ids))[:1] == DOCUMENTS


@pytest.mark.parametrize("mask", ["equal", "unequal", "difference"])
def test_chunks_of_long_rows_are_not_compared(mask: str):
    length, size = 1 << 17, 1 << 13
    with torch.device("meta"):
        q = torch.zeros(2, 1, length, 1)

    def attend(q: Tensor) -> Tensor:
        query, key = torch.arange(length)[:, None], torch.arange(length)
        if mask == "unequal":
            shown = ~((query // size != key // size) | (query < key))
        elif mask == "equal":
            shown = (query // size == key // size) & (query >= key)
        else:
            shown = (query // size - key // size == 0) & (query >= key)
        return 2 * F.scaled_dot_product_attention(q, q, q, shown)

    captured = normal_form(attend, q)
    assert [n for n in operators(captured) if "attention" in n] == DOCUMENTS
    assert set_document_lengths(captured, (), {}) == (size,) * 32
    assert max(n.meta["val"].numel() for n in captured.graph.nodes if hasattr(n.meta.get("val"), "numel")) == 2 * length


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chunks", (4, 1, 4, 4, 1, 4, 4, 2)),
        ("chunks of places within", (4, 1, 4, 4, 1, 4, 4, 2)),
        ("chunks of the row", (2, 3, 2, 5, 2, 3, 5, 2)),
        ("three kinds", (5, 5, 4, 5, 5)),
        ("chunks without documents", (5, 5, 5, 5, 4) * ROWS),
    ],
)
def test_lengths_of_documents_are_divided_into_chunks(name: str, expected: tuple[int, ...]):
    """Given lengths are divided as the ids of documents of such lengths are."""
    mask, data = SOURCES[name]
    captured = normal_form(_by_mask(mask), *_operands(), *data)
    set_document_lengths(captured, (5, 9, 10), {})
    assert [tuple(n.args[4]) for n in list_document_attentions(captured.graph)] == [expected]  # type: ignore[arg-type]
    set_document_lengths(captured, (), {i.path: d for i, d in zip(captured.inputs[3:], data, strict=False)})
    (node,) = list_document_attentions(captured.graph)
    if name != "three kinds":  # whose documents are other ones in the data
        assert tuple(node.args[4])[: len(expected)] == expected  # type: ignore[arg-type]


class Flexible(nn.Module):
    """Attention by a mask function of indices: documents, causal or in a window."""

    def __init__(self, window: int | None, compiled: bool, cap: float | None = None) -> None:
        super().__init__()
        self.window, self.cap = window, cap
        self.attend = torch.compile(flex_attention) if compiled else flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        def same(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ids[row, query] == ids[row, key]

        def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query >= key

        def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query - key <= (self.window or 0)

        def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score if self.cap is None else self.cap * torch.tanh(score / self.cap)

        shown = and_masks(same, causal, *([near] if self.window else []))
        mask = create_block_mask(shown, len(ids), None, LENGTH, LENGTH, device=q.device)
        return 2 * self.attend(q, k, v, score_mod=capped, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_mask_functions_of_flex_attention(window: int | None, compiled: bool):
    captured = normalize(capture(Flexible(window, compiled), (*_operands(), _packed_ids())))
    assert [n for n in operators(captured) if "attention" in n] == DOCUMENTS
    (found,) = run_graph(captured.graph, [*_operands(), _packed_ids()])
    expected = 2 * _dense(*_operands(), _packed_ids(), Band(window, 0), None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_score_functions_of_flex_attention():
    captured = normalize(capture(Flexible(None, False, 0.5), (*_operands(), _packed_ids())))
    (found,) = run_graph(captured.graph, [*_operands(), _packed_ids()])
    q, k, v = _operands()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 0.5 * torch.tanh(q @ k.transpose(-2, -1) / 2 / 0.5)
    expected = 2 * scores.masked_fill(~(_pairs(_packed_ids()) & _causal()), -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Summed(Flexible):
    """Attention whose logarithms of sums of exponentials weigh the results, as in attention that is combined later."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        def shown(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (ids[row, query] == ids[row, key]) & (query >= key)

        mask = create_block_mask(shown, len(ids), None, LENGTH, LENGTH, device=q.device)
        found, sums = self.attend(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return found * sums[..., None]


def test_logarithms_of_sums_of_flex_attention():
    captured = normalize(capture(Summed(None, False), (*_operands(), _packed_ids())))
    (found,) = run_graph(captured.graph, [*_operands(), _packed_ids()])
    q, k, v = _operands()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~(_pairs(_packed_ids()) & _causal()), -torch.inf)
    expected = scores.softmax(-1) @ v * scores.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- lengths ----------------------------------------------------------------------------------------------------------


def _count_pairs(ids: Tensor, places: Tensor, band: Band) -> int:
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    seen = ids[:, :, None] == ids[:, None, :]
    seen &= distance <= (ids.shape[1] if band.before is None else band.before)
    seen &= distance >= (-ids.shape[1] if band.after is None else -band.after)
    return int(seen[:, places].sum())


@settings(max_examples=60)
@given(st.integers(1, 4), st.booleans(), LIMITS, LIMITS, st.integers(0, 99))
def test_pairs_of_documents_are_counted(num_ranks: int, zigzag: bool, before: Any, after: Any, seed: int):
    row, band = 2 * num_ranks * 3, Band(before, after)
    ids = torch.randint(0, 4, (ROWS, row), generator=torch.Generator().manual_seed(seed)).sort(1).values
    lengths = tuple(int(n) for r in ids for n in r.unique_consecutive(return_counts=True)[1])
    place, layout = torch.arange(row), make_shard_layout(0, (), zigzag)
    most = max(_count_pairs(ids, take_shard(place, layout, num_ranks, r), band) for r in range(num_ranks))
    assert count_document_pairs(lengths, row // num_ranks, num_ranks, zigzag, band) == most / ROWS


def test_lengths_that_fill_no_row_are_a_mean():
    """A quarter of the pairs where documents have a quarter of the row; never more than without documents."""
    assert count_document_pairs((5,), 20, 1, False, Band()) == 20 * 5
    assert count_document_pairs((5,), 10, 2, False, Band()) == 10 * 5
    assert count_document_pairs((100,), 20, 1, False, Band(None, 0)) == count_max_pairs(20, 20, 1, False, Band(None, 0))


def test_lengths_are_counted_in_the_inputs():
    data = _packed_ids()
    captured = normal_form(lambda *x: 2 * NOTATIONS["boolean"](*x), *_operands(), data)
    assert set_document_lengths(captured, (), {}) == ()
    assert set_document_lengths(captured, (), {"args.0": data}) == ()
    path = captured.inputs[3].path
    assert set_document_lengths(captured, (), {path: data}) == (5, 9, 10, 11, 1, 12)
    assert set_document_lengths(captured, (4, 20), {path: data}) == (4, 20)
    assert [list(n.args[4]) for n in list_document_attentions(captured.graph)] == [[4, 20]]
