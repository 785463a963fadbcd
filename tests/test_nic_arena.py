"""The allocator of prompt space, against a plain list of what is taken."""

from hypothesis import given
from hypothesis import strategies as st

from blink_ref.nic.arena import Arena

SIZE = 64
HISTORIES = st.lists(st.tuples(st.booleans(), st.integers(1, SIZE), st.integers(0, 1000)), max_size=60)


def longest_gap(taken):
    edges = sorted(taken)
    ends = [0] + [start + length for start, length in edges]
    starts = [start for start, _ in edges] + [SIZE]
    return max(start - end for start, end in zip(starts, ends, strict=True))


@given(HISTORIES)
def test_intervals_never_overlap_and_every_gap_is_found(history):
    arena, taken = Arena(SIZE), []
    for give, length, choice in history:
        if give and taken:
            arena.give(*taken.pop(choice % len(taken)))
            continue
        fits = longest_gap(taken) >= length
        start = arena.take(length)
        assert (start is not None) == fits
        if start is not None:
            assert 0 <= start <= SIZE - length
            assert all(start + length <= other or other + n <= start for other, n in taken)
            taken.append((start, length))
    for interval in taken:
        arena.give(*interval)
    assert arena.take(SIZE) == 0, "all that was returned has been joined again"


def test_the_first_hole_that_fits_is_taken():
    arena = Arena(10)
    first, second, third = arena.take(2), arena.take(3), arena.take(5)
    assert (first, second, third) == (0, 2, 5)
    arena.give(2, 3)
    assert arena.take(4) is None
    assert arena.take(1) == 2
