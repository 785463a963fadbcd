"""The 64-bit word of an mbarrier, where the hardware has none of its own.

From bit 62 down: the parity of the phase that runs (1 bit), the arrivals it still lacks (15), the arrivals that
a phase takes (15), and 2**31 + the bytes it still lacks (32). The hardware's own layout is opaque.
"""

PARITY, MISSING, COUNT = 62, 47, 32
ARRIVALS, BYTES, NO_BYTES = (1 << 15) - 1, (1 << 32) - 1, 1 << 31


def fresh(count):
    """The word in phase 0, each phase of which takes `count` arrivals."""
    return (count << MISSING) + (count << COUNT) + NO_BYTES


def after(word, arrivals, size):
    """The word after so many arrivals, and `size` bytes more to come; lacking nothing, it begins a phase."""
    word += size - (arrivals << MISSING)
    if (word >> MISSING) & ARRIVALS == 0 and word & BYTES == NO_BYTES:
        word = (word ^ (1 << PARITY)) + (((word >> COUNT) & ARRIVALS) << MISSING)
    return word


def parity(word):
    """The parity of the phase that runs: 0 at first."""
    return (word >> PARITY) & 1


def arrived(word, size):
    """The word after one arrival that expects `size` bytes; raises ValueError where the phase takes none."""
    if (word >> MISSING) & ARRIVALS == 0:
        count = (word >> COUNT) & ARRIVALS
        raise ValueError(f"one arrival too many: a phase of the mbarrier takes {count}, and waits for bytes only")
    return after(word, 1, size)
