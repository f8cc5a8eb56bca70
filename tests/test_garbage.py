import gc

import pytest

from partitioner.garbage import rare_collections


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
