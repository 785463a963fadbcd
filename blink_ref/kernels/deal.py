"""How the tiles of a step's products (:mod:`.tiles`) are dealt to the blocks.

It depends on the number of rows, which is the same for all layers: so it is noted in the arena when a step
begins, and read where it is wanted, in place of a dozen divisions each time.
"""

from ..simt import device
from ..simt.vocabulary import DOTS_ROWS, DOTS_STRIPS, Tile, arena_view, block_threads, divide, i32, i64, thread_id
from .packing import AT, LOGITS, SIZE, STEPS, STRIPS, block_row_at
from .staging import DEAL, DEALT, PRODUCTS

ITEMS, PIECES, HEIGHT, DOWN, ALL_STRIPS, ALL_STEPS, EACH, ACROSS, FIRST_ROW, HERE, PIECE = range(DEAL)
"""Words of what is noted of a product: how many items there are for all blocks, tiles or pieces of them; the
pieces of a tile, its rows, and the tiles that have all rows, for the same outputs. The product's strips, the
fragments of each, and those of a piece. Then of the item that is this block's first one: see :func:`place_of`."""

LEAST_STEPS = 2
"""Fewest fragments of a strip that a piece of a tile has."""

MOST_PIECES = 8
"""Most pieces of a tile."""


@device
def note_deal(block, rows, samples, model):
    """Note all products' tiles, a lane each, for steps of so many rows. All lanes; a barrier is to follow."""
    kind, work = i64(thread_id()), arena_view(block.shared, DEALT, DEAL * PRODUCTS, model.eos)
    while kind < PRODUCTS:
        at, number, n = DEAL * kind, kind, i64(rows)
        if kind == LOGITS:
            number, n = 4 * i64(model.layers), i64(samples)
        strips, steps = i64(model.stream[number, STRIPS]), i64(model.stream[number, STEPS])
        across = (strips + (DOTS_STRIPS - 1)) >> 3
        height = tile_height(block, across, n)
        down = divide(n + height - 1, height)[0]
        pieces = i64(1) if kind == LOGITS else pieces_of_tile(block, across * down, steps)
        work[at + ITEMS] = i32(across * down * pieces)
        work[at + PIECES] = i32(pieces)
        work[at + HEIGHT] = i32(height)
        work[at + DOWN] = i32(down)
        work[at + ALL_STRIPS] = i32(strips)
        work[at + ALL_STEPS] = i32(steps)
        work[at + EACH] = i32(divide(steps, pieces)[0])
        tile, piece = divide(i64(block.id), pieces)
        its_across, its_down = divide(tile, max(down, i64(1)))
        work[at + ACROSS] = i32(its_across)
        work[at + FIRST_ROW] = i32(its_down * height)
        work[at + HERE] = i32(min(height, n - its_down * height))
        work[at + PIECE] = i32(piece)
        kind += block_threads()


@device
def tile_height(block, across, rows):
    """Rows of a tile: 128, or 64 where that takes less time, in which a block makes 9 such tiles in place of 5."""
    half, more = i64(DOTS_ROWS >> 1), i64(block.blocks) - 1
    large = divide(across * (divide(rows + DOTS_ROWS - 1, i64(DOTS_ROWS))[0]) + more, i64(block.blocks))[0]
    small = divide(across * (divide(rows + half - 1, half)[0]) + more, i64(block.blocks))[0]
    return half if rows <= half or 5 * small < 9 * large else i64(DOTS_ROWS)


@device
def pieces_of_tile(block, tiles, steps):
    """Into how many pieces each tile is cut: 1, or as many, up to MOST_PIECES, as there are blocks for at once."""
    pieces = i64(1)
    while (
        pieces < MOST_PIECES and 2 * pieces * tiles <= block.blocks and steps & (2 * LEAST_STEPS * pieces - 1) == 0
    ):
        pieces *= 2
    return pieces


@device
def noted(block, kind, word, model):
    """A word of what is noted of a product."""
    return arena_view(block.shared, DEALT, DEAL * PRODUCTS, model.eos)[DEAL * i64(kind) + word]


@device
def place_of(block, rows, kind, item, model):
    """(number of the outputs' tile, first row, rows, number of the piece) of an item.

    Tiles of the same outputs follow each other, so that other blocks find the weights in the cache. A block has
    more than one item only where tiles are not cut.
    """
    work, at = arena_view(block.shared, DEALT, DEAL * PRODUCTS, model.eos), DEAL * i64(kind)
    if item == block.id:
        return i64(work[at + ACROSS]), i64(work[at + FIRST_ROW]), i64(work[at + HERE]), i64(work[at + PIECE])
    across, down = divide(i64(item), i64(work[at + DOWN]))
    height = i64(work[at + HEIGHT])
    return across, down * height, min(height, i64(rows) - down * height), i64(0)


@device
def strips_of(block, kind, across, model):
    """How many strips a product has for its tiles number `across`."""
    return min(i64(DOTS_STRIPS), i64(noted(block, kind, ALL_STRIPS, model)) - across * DOTS_STRIPS)


@device
def tile_of(block, rows, kind, layer, item, model):
    """What a block multiplies for an item: a tile, or a piece of one."""
    across, t0, here, piece = place_of(block, rows, kind, item, model)
    number = 4 * i64(model.layers) if kind == LOGITS else 4 * i64(layer) + kind
    steps, n = i64(noted(block, kind, ALL_STEPS, model)), i64(noted(block, kind, EACH, model))
    at = (i64(model.stream[number, AT]) + across * DOTS_STRIPS * steps) * SIZE
    most, j = i64(noted(block, kind, HEIGHT, model)), block_row_at(rows, t0, i64(0))
    return Tile(at, steps, strips_of(block, kind, across, model), j, i64(rows), here, most, piece * n, n)
