"""The cycle collector while plans are made: fewer passes, the user's settings restored, and no plan kept alive."""

import gc
import weakref

import pytest

from partitioner.solve.evaluate import prepared_model
from partitioner.solve.evaluate.prepared_model import rare_collections


def test_the_users_threshold_comes_back_also_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="interrupted"), rare_collections():  # noqa: PT012 - the state inside counts
        assert gc.get_threshold() > before
        raise RuntimeError("interrupted")
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        before = gc.get_threshold()
        with rare_collections():
            assert not gc.isenabled()
            assert gc.get_threshold() == before
    finally:
        gc.enable()


class _Loop:
    def __init__(self):
        self.itself = self


def _leave(many: int) -> weakref.ref:
    """Objects inside that nothing refers to but themselves, and one of them."""
    with rare_collections():
        loops = [_Loop() for _ in range(many)]
        return weakref.ref(loops[0])


@pytest.fixture
def _nothing_put_off(monkeypatch):
    monkeypatch.setattr(prepared_model, "_put_off", 0)
    gc.unfreeze()  # as for users: tests freeze what was imported
    gc.collect()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_nothing_put_off")
def test_what_is_left_is_collected_with_a_later_plan(monkeypatch):
    monkeypatch.setattr(prepared_model, "_TOO_MANY", 150_000)
    before = [each["collections"] for each in gc.get_stats()]
    first = _leave(80_000)
    assert [each["collections"] for each in gc.get_stats()] == before, "no pass at the end"
    second = _leave(80_000)
    assert first() is not None and second() is not None
    with rare_collections():
        assert first() is None
        assert second() is None


@pytest.mark.usefixtures("_nothing_put_off")
def test_what_the_user_has_frozen_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        left = _leave(80_000)
        assert frozen - 100 < gc.get_freeze_count() <= frozen, "a few frozen objects may end, and none is added"
        gc.collect(1)
        assert left() is None, "then nothing is put off"
    finally:
        gc.unfreeze()
