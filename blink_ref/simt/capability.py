"""What GPUs of each compute capability offer."""

OLDEST = (7, 5)
"""The oldest compute capability served: Turing, the T4 of free notebooks."""

STATIC_SHARED = 1024
"""Bytes of shared memory kept from the arena: what the kernel declares itself and the driver takes."""

SHARED_LIMIT = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (12, 0): 99,
}
"""KiB of shared memory a block can have (CUDA programming guide, "Compute Capabilities")."""


def arena_bytes(cc: tuple[int, int]) -> int:
    """Bytes of arena of a block on a GPU of compute capability `cc`; on one not in the table, the least of all."""
    return SHARED_LIMIT.get(cc, min(SHARED_LIMIT.values())) * 1024 - STATIC_SHARED


def architecture(cc: tuple[int, int]) -> str:
    """ptxas's name: with an "a", as numba-cuda compiles for the present GPU, where the code has instructions that
    only this capability has."""
    return f"sm_{cc[0]}{cc[1]}" + "a" * (cc == (9, 0))


def name(cc: tuple[int, int]) -> str:
    """9.0 for (9, 0)."""
    return f"{cc[0]}.{cc[1]}"
