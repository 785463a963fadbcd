"""Room for prompts in a worker's part of the window's arena."""

from bisect import bisect_left


class Arena:
    """First-fit allocation of intervals of ``size`` tokens; neighbours that are both free are joined.

    Prompts live for as long as their request, so holes are few and a sorted list of them is enough
    (Knuth, The Art of Computer Programming, volume 1, section 2.5).
    """

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]  # (start, end), sorted, never touching

    def take(self, length: int) -> int | None:
        """Start of a free interval of ``length`` tokens, now taken; None if no hole is that long."""
        for n, (start, end) in enumerate(self._holes):
            if end - start >= length:
                self._holes[n : n + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Return an interval got from :meth:`take`."""
        end = start + length
        n = bisect_left(self._holes, (start, end))
        before = after = n
        if n > 0 and self._holes[n - 1][1] == start:
            before, start = n - 1, self._holes[n - 1][0]
        if n < len(self._holes) and self._holes[n][0] == end:
            after, end = n + 1, self._holes[n][1]
        self._holes[before:after] = [(start, end)]
