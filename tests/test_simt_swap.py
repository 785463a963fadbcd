"""Swapping one device function for another in whatever calls it."""

import numpy as np
import pytest

from blink_ref.config import cache_dir
from blink_ref.simt import device, launch, swap
from blink_ref.simt.vocabulary import barrier, thread_id


@device
def grown(x):
    return x + 1


@device
def grown_twice(x):
    return grown(grown(x))


@device
def grow(block, a):
    if thread_id() == 0:
        a[0] = grown_twice(a[0])


@device
def shrunk(x):
    return x - 1


kept = device(grown.python)


@device
def grown_by_ten(x):
    return kept(x) + 9


@device
def grown_together(x):
    barrier()
    return x + 1


def grow_once(target, lanes):
    a = np.zeros(1, np.int64)
    launch(grow, 1, lanes, a, target=target)
    return int(a[0])


def test_callers_of_callers_get_the_new_one_and_afterwards_the_old(target, lanes):
    assert grow_once(target, lanes) == 2
    with swap(grown, shrunk):
        assert grow_once(target, lanes) == -2
    assert grow_once(target, lanes) == 2


def test_the_new_one_may_call_the_old_under_another_name(target, lanes):
    with swap(grown, grown_by_ten):
        assert grow_once(target, lanes) == 20


def test_swaps_nest(target, lanes):
    with swap(grown, shrunk):
        with swap(grown, grown_by_ten):
            assert grow_once(target, lanes) == 20
        assert grow_once(target, lanes) == -2
    assert grow_once(target, lanes) == 2


def test_a_failure_inside_undoes_the_swap():
    with pytest.raises(ZeroDivisionError), swap(grown, shrunk):
        raise ZeroDivisionError
    assert grow_once("python", 1) == 2


def on_disk():
    return {path: path.stat().st_mtime_ns for path in (cache_dir() / "cpu").glob(f"{__name__}.*")}


def test_what_was_compiled_is_neither_lost_nor_is_the_cache_on_disk_touched():
    grow_once("cpu", 1)
    compiled, files = grow.cpu, on_disk()
    assert files
    with swap(grown, shrunk):
        grow_once("cpu", 1)
        assert grow.cpu is not compiled
    assert grow.cpu is compiled
    assert on_disk() == files


def test_a_barrier_where_callers_expect_none_is_refused():
    with pytest.raises(ValueError, match=r"grown_together> and not in .*grown>"), swap(grown, grown_together):
        pass
