"""How a block uses its arena: scratch for reductions, the stream's own words, then what a phase needs."""

from ..simt import device
from ..simt.vocabulary import divide, f32, i64, lane_id, row_dot, warp_id, warps

REDUCTIONS = 64
"""Floats at the arena's start for reductions within the block: at least the warps of a block."""

STAGES = 2
"""Stages of each warp, for pieces of weights that are on their way (see stream.py)."""

MOST_WARPS, MOST_ROWS = 16, 16
"""Most warps of a block that computes from the stream, and most rows of a step."""

STAGE_BARRIERS = REDUCTIONS
"""Where an mbarrier for each stage lies in the arena."""

CURSORS = STAGE_BARRIERS + 2 * STAGES * MOST_WARPS
"""Where the warps' cursors begin in the arena."""

CURSOR = 14
"""Words of a cursor."""

KINDS, KIND = CURSORS + CURSOR * MOST_WARPS, 10
"""Where it is noted what there is to know of the stream's kinds of products, and the words of each; behind these
come six for all of them."""

BESTS = (KINDS + 5 * KIND + 7) & -2
"""Where the rank key lies of the best token that a block has seen for each sample, two floats each."""

PLACES = BESTS + 2 * MOST_ROWS
"""Where each row's position lies in the arena, and the page that its keys and values go to."""

MOST_LISTED = 256
"""Most entries of the attention's list of work (see work_list.py)."""

ENTRY = 5
"""Words of an entry."""

MOST_PARTS = 8
"""Most parts of an item of that list (see flash_items.py), and most warps of a team that attends to it."""

TEAMS = 2
"""Most teams of a block."""

OWN = ENTRY * (MOST_LISTED + 1)
"""Where in the list, behind the entry that ends it, a block notes which items are its own, and where they lie."""

MOST_NOTED = 16
"""Most of its own items that a team has noted at a time."""

ITEM = 13 + 2 * MOST_PARTS
"""Words of what is noted of an item."""

LISTED = OWN + 14 + TEAMS * (3 + MOST_NOTED * ITEM)
"""Words of the list, and of that."""

WORK = PLACES + 2 * MOST_ROWS
"""Where that list begins in the arena."""

DEALT = WORK + LISTED
"""Where it is noted how tiles are dealt to the blocks (see deal.py)."""

PRODUCTS, DEAL = 5, 11
"""Products of which that is noted, and words of it for each."""

MEETINGS, MEETINGS_OF_TEAM = (DEALT + PRODUCTS * DEAL + 1) & -2, 16
"""Where mbarriers lie by which the warps of a team meet, and the floats of a team's (see flash_items.py)."""

COMING, COMING_SIZE = MEETINGS + TEAMS * MEETINGS_OF_TEAM, 6
"""Where each of these warps tells what has come of what it has asked for, and the floats for it."""

SCRATCH = (COMING + COMING_SIZE * TEAMS * MOST_PARTS + 31) & -32
"""Where that begins which a phase may use as it likes: a multiple of 32."""


TILE = 64
"""Most rows staged at once."""


@device
def result_at(which):
    """Where this warp's TILE results number `which` (0 or 1) begin in the arena."""
    return SCRATCH + TILE * (2 * i64(warp_id()) + which)


@device
def staged_at():
    """Where the staged rows begin in the arena."""
    return SCRATCH + 2 * TILE * i64(warps())


@device
def rows_at_once(block, width):
    """How many rows of `width` floats can be staged at once."""
    return min(i64(TILE), divide(i64(block.shared.shape[0]) - staged_at(), i64(width))[0])


def arena(rows: int, width: int, warps_in_block: int) -> int:
    """Floats of arena that `rows` staged rows of `width` need."""
    return SCRATCH + 2 * TILE * warps_in_block + rows * width


@device
def partial_square(x, at, width):
    """This warp's share of the sum of squares of ``x[at:at+width]``; all its lanes get it.

    The warps share the row in runs of a multiple of 8, so the order depends on `width` and the
    number of warps only.
    """
    run = divide(width + 8 * warps() - 1, 8 * i64(warps()))[0] * 8
    first = min(width, run * i64(warp_id()))
    n = min(width, first + run) - first
    return row_dot(x, at + first, x, at + first, n)


@device
def add_up(block):
    """The sum of the first `warps` floats of the scratch, in order. A barrier stands before."""
    total = f32(0.0)
    for w in range(warps()):
        total += block.shared[w]
    return total


@device
def put_partial(block, value):
    """Leave a warp's value in the scratch, for :func:`add_up` after a barrier."""
    if lane_id() == 0:
        block.shared[warp_id()] = value
