"""Each kind of fault has a small device function whose lines are reported, and a correct twin that is clean."""

import inspect

import numpy as np
import pytest

from blink_ref.errors import BlinkError
from blink_ref.simt import device, grid_barrier, launch
from blink_ref.simt.checker import (
    Deadlock,
    Divergence,
    Finding,
    OutOfBounds,
    Race,
    Unwritten,
    check,
)
from blink_ref.simt.vocabulary import (
    BLOCK,
    GPU,
    SYSTEM,
    acquire_fence,
    atomic_add,
    atomic_max,
    barrier,
    f32,
    i64,
    lane_id,
    lane_sum,
    load_acquire,
    load_relaxed,
    relax,
    store_relaxed,
    store_release,
    thread_id,
    warp_barrier,
)

SEEDS = range(6)


def ints(n=8):
    return np.zeros(n, np.int64)


def found(kind, fn, *args, blocks=1, lanes=8, seeds=SEEDS, **more):
    """The finding of each seed: all of `kind`."""
    findings = []
    for seed in seeds:
        with pytest.raises(Finding) as caught:
            check(fn, blocks, lanes, *args, seed=seed, **more)
        assert type(caught.value) is kind, caught.value
        findings.append(caught.value)
    return findings


def clean(fn, *args, blocks=1, lanes=8, **more):
    for seed in SEEDS:
        check(fn, blocks, lanes, *args, seed=seed, **more)


def marked(fn):
    """The lines of a device function that end with a comment "here"."""
    lines, first = inspect.getsourcelines(fn.python)
    return {first + n for n, line in enumerate(lines) if line.endswith("# here\n")}


def lines_of(finding):
    assert all(place.line.file == __file__ for place in finding.places)
    return {place.line.number for place in finding.places}


# --- races between lanes of a block


@device
def neighbours(block, out):
    block.shared[thread_id()] = f32(thread_id())  # here
    out[thread_id()] = i64(block.shared[thread_id() ^ 1])  # here


@device
def neighbours_with_a_barrier(block, out):
    block.shared[thread_id()] = f32(thread_id())
    barrier()
    out[thread_id()] = i64(block.shared[thread_id() ^ 1])


@device
def neighbours_with_a_warp_barrier(block, out):
    block.shared[thread_id()] = f32(thread_id())
    warp_barrier()
    out[thread_id()] = i64(block.shared[thread_id() ^ 1])


@device
def strangers_with_a_warp_barrier(block, out):
    block.shared[thread_id()] = f32(thread_id())  # here
    warp_barrier()
    out[thread_id()] = i64(block.shared[7 - thread_id()])  # here


def test_a_missing_barrier_is_a_race_of_two_lines():
    for finding in found(Race, neighbours, ints()):
        assert lines_of(finding) == marked(neighbours)
        assert len({place.who for place in finding.places}) == 2
        assert finding.about.startswith("block.shared[")
        assert "a warp_barrier() or a barrier()" in finding.advice
    clean(neighbours_with_a_barrier, ints())
    clean(neighbours_with_a_warp_barrier, ints())


def test_a_warp_barrier_does_not_order_two_warps():
    for finding in found(Race, strangers_with_a_warp_barrier, ints()):
        assert lines_of(finding) == marked(strangers_with_a_warp_barrier)
        assert "warp_barrier" not in finding.advice


@device
def exchange_in_place_of_a_barrier(block, out):
    block.shared[thread_id()] = f32(1.0)  # here
    lane_sum(f32(1.0))
    out[thread_id()] = i64(block.shared[thread_id() ^ 1])  # here


def test_an_exchange_of_values_orders_no_memory():
    for finding in found(Race, exchange_in_place_of_a_barrier, ints()):
        assert lines_of(finding) == marked(exchange_in_place_of_a_barrier)


@device
def all_write_one(block, out):
    out[0] = i64(thread_id())  # here


def test_two_writes_race_too():
    for finding in found(Race, all_write_one, ints()):
        assert lines_of(finding) == marked(all_write_one)
        assert finding.about == "out[0]"
        assert [place.did for place in finding.places] == ["writes it", "writes it"]


@device
def read_then_overwrite(block, out):
    out[thread_id()] = i64(block.grid[0])
    if thread_id() == 3:
        block.grid[0] = 1  # here


def test_a_write_races_with_reads_before_it():
    for finding in found(Race, read_then_overwrite, ints()):
        assert marked(read_then_overwrite) < lines_of(finding)
        assert finding.about == "block.grid[0]"


@device
def matrix_row(block, table, out):
    row = table[thread_id()]
    row[1] = thread_id()
    barrier()
    out[thread_id()] = table[7 - thread_id(), 1] + table[thread_id()][1:2][0]


@device
def matrix_row_without_a_barrier(block, table, out):
    row = table[thread_id()]
    row[1] = thread_id()  # here
    out[thread_id()] = table[7 - thread_id(), 1]  # here


def test_views_of_an_array_are_the_array():
    table, out = np.zeros((8, 2), np.int32), ints()
    clean(matrix_row, table, out)
    assert out.tolist() == [7] * 8
    for finding in found(Race, matrix_row_without_a_barrier, table, out):
        assert lines_of(finding) == marked(matrix_row_without_a_barrier)
        assert finding.about.startswith("table[")
        assert finding.about.endswith(", 1]")


# --- races between blocks


@device
def blocks_without_a_grid_barrier(block, out):
    if thread_id() == 0:
        out[block.id] = 1  # here
    barrier()
    if thread_id() == 1:
        out[block.id + 2] = out[1 - block.id]  # here


@device
def blocks_with_a_grid_barrier(block, out):
    if thread_id() == 0:
        out[block.id] = 1
    grid_barrier(block)
    if thread_id() == 1:
        out[block.id + 2] = out[1 - block.id]


def test_a_barrier_does_not_order_two_blocks_and_a_grid_barrier_does():
    for finding in found(Race, blocks_without_a_grid_barrier, ints(), blocks=2):
        assert lines_of(finding) == marked(blocks_without_a_grid_barrier)
        assert "grid_barrier(block)" in finding.advice
    clean(blocks_with_a_grid_barrier, ints(), blocks=2)


def message(store_scope, load, load_scope, store=store_release):
    """A device function that hands one number from block 0 to block 1."""

    @device
    def pass_on(block, box, flag):
        if block.id == 0:
            box[0] = 7
            store(flag, 0, i64(1), store_scope)
        else:
            spins = i64(0)
            while load(flag, 0, load_scope) == 0:
                relax(spins)
                spins += 1
            box[1] = box[0]

    return pass_on


def test_a_release_that_is_acquired_orders_in_both_scopes_only():
    for store_scope, load_scope in ((GPU, GPU), (SYSTEM, GPU), (GPU, SYSTEM)):
        for seed in SEEDS:
            check(message(store_scope, load_acquire, load_scope), 2, 1, ints(), ints(), seed=seed)
    for store_scope, load_scope in ((BLOCK, GPU), (GPU, BLOCK)):
        finding = found(Race, message(store_scope, load_acquire, load_scope), ints(), ints(), blocks=2, lanes=1)[0]
        assert finding.about == "flag[0]"
        assert finding.advice.endswith("it takes GPU")


@pytest.mark.parametrize("words", [(load_relaxed, store_release), (load_acquire, store_relaxed)])
def test_a_relaxed_access_orders_nothing(words):
    load, store = words
    for seed in SEEDS:
        with pytest.raises(Race) as caught:
            check(message(GPU, load, GPU, store), 2, 1, ints(), ints(), seed=seed)
        assert caught.value.about == "box[0]"
        assert {place.line.text for place in caught.value.places} == {"box[0] = 7", "box[1] = box[0]"}


@device
def pass_on_by_a_fence(block, box, flag, fence_scope):
    if block.id == 0:
        box[0] = 7
        store_release(flag, 0, i64(1), GPU)
    else:
        spins = i64(0)
        while load_relaxed(flag, 0, GPU) == 0:
            relax(spins)
            spins += 1
        acquire_fence(fence_scope)
        box[1] = box[0]


def test_a_fence_makes_relaxed_loads_acquire_within_its_scope():
    for seed in SEEDS:
        check(pass_on_by_a_fence, 2, 1, ints(), ints(), GPU, seed=seed)
        with pytest.raises(Race) as caught:
            check(pass_on_by_a_fence, 2, 1, ints(), ints(), BLOCK, seed=seed)
        assert caught.value.about == "box[0]"


@device
def plain_flag(block, box, flag):
    if block.id == 0:
        store_release(flag, 0, i64(1))  # here
    else:
        while flag[0] == 0:  # here
            relax(i64(0))


def test_a_plain_access_races_with_an_ordered_one():
    for finding in found(Race, plain_flag, ints(), ints(), blocks=2, lanes=1):
        assert lines_of(finding) == marked(plain_flag)
        assert "ordered words on both sides" in finding.advice


@device
def tickets(block, out, counter):
    out[atomic_add(counter, 0, i64(1))] = 1


@device
def last_one_sums(block, out, counter):
    mine = block.id * 8 + thread_id()
    out[mine] = mine
    if atomic_add(counter, 0, i64(1)) == 15:
        total = i64(0)
        for n in range(16):
            total += out[n]
        counter[1] = total


def test_atomics_order_and_do_not_race_with_each_other():
    for seed in SEEDS:
        out, counter = ints(16), ints(2)
        check(tickets, 2, 8, out, counter, seed=seed)
        assert out.all()
        check(last_one_sums, 2, 8, out, np.zeros(2, np.int64), seed=seed)


# --- agents outside of the grid


def ringing(scope):
    def nic(box, bell):
        box[0] = 7
        store_release(bell, 0, np.int64(1), scope)

    return nic


@device
def answer(block, box, bell):
    spins = i64(0)
    while load_acquire(bell, 0, SYSTEM) == 0:
        relax(spins)
        spins += 1
    box[1] = box[0]


def test_an_outside_agent_is_ordered_by_words_of_system_scope():
    for seed in SEEDS:
        check(answer, 1, 1, ints(), ints(), seed=seed, outside=[ringing(SYSTEM)])
    finding = found(Race, answer, ints(), ints(), lanes=1, outside=[ringing(GPU)])[0]
    assert finding.advice.endswith("it takes SYSTEM")
    assert "the agent nic" in str(finding)


# --- memory nobody wrote, and what is no memory at all


@device
def sum_of_the_arena(block, out):
    if thread_id() > 0:
        block.shared[thread_id()] = f32(1.0)
    barrier()
    if thread_id() == 0:
        out[0] = i64(block.shared[0] + block.shared[1])  # here


def test_an_arena_holds_nothing_at_launch():
    for finding in found(Unwritten, sum_of_the_arena, np.zeros(1)):
        assert lines_of(finding) == marked(sum_of_the_arena)
        assert finding.about == "block.shared[0]"


@device
def copy(block, a, out):
    out[thread_id()] = a[thread_id()]  # here


def test_an_array_may_be_declared_unwritten():
    a = np.zeros(8, np.float32)
    clean(copy, a, ints())
    for finding in found(Unwritten, copy, a, ints(), unwritten=[a]):
        assert lines_of(finding) == marked(copy)


@device
def shifted_copy(block, a, out):
    out[thread_id()] = a[thread_id() - 1]  # here


@pytest.mark.parametrize("fn", [copy, shifted_copy])
def test_an_index_outside_an_array_is_reported_a_negative_one_too(fn):
    for finding in found(OutOfBounds, fn, ints(7), ints()):
        assert lines_of(finding) == marked(fn)
        assert finding.about.startswith(("a[7]", "a[-1]"))
        assert finding.about.endswith(", of an array of shape (7,)")


@device
def second_column(block, table, out):
    out[thread_id()] = table[thread_id(), 1] + table[thread_id() >> 1, thread_id()]


def test_each_dimension_of_a_table_is_checked():
    findings = found(OutOfBounds, second_column, np.zeros((8, 4), np.int32), ints())
    assert all(finding.about.endswith(", of an array of shape (8, 4)") for finding in findings)


# --- lanes that do not meet


@device
def two_barriers(block, out):
    if thread_id() == 3:
        barrier()  # here
    else:
        barrier()  # here


@device
def left_early(block, out):
    if thread_id() == 3:
        return
    barrier()  # here


@device
def exchange_of_some(block, out):
    if lane_id() > 0:
        out[thread_id()] = lane_sum(lane_id())  # here
    else:
        warp_barrier()  # here


def test_barriers_and_exchanges_are_for_all_lanes_at_one_place():
    for finding in found(Divergence, two_barriers, ints()):
        assert lines_of(finding) == marked(two_barriers)
    for finding in found(Divergence, exchange_of_some, ints()):
        assert lines_of(finding) == marked(exchange_of_some)
        assert "warp" in finding.about
    for finding in found(Divergence, left_early, ints()):
        assert lines_of(finding) == marked(left_early)
        assert "block 0, lane 3 has ended" in finding.about


@device
def meet(block):
    barrier()


@device
def meet_by_two_ways(block, out):
    if thread_id() == 3:
        meet(block)  # here
    else:
        meet(block)  # here


def test_the_same_barrier_reached_by_two_ways_is_shown_where_they_part():
    for finding in found(Divergence, meet_by_two_ways, ints()):
        assert lines_of(finding) == marked(meet_by_two_ways)


@device
def crossed(block, flag):
    if thread_id() == 0:
        barrier()  # here
    elif thread_id() < 4:
        warp_barrier()  # here
    else:
        while load_acquire(flag, 0) == 0:  # here
            relax(i64(0))  # here


def test_a_grid_that_waits_for_ever_says_where():
    for finding in found(Deadlock, crossed, ints(), lanes=5):
        assert lines_of(finding) <= marked(crossed)
        assert {place.did for place in finding.places} == {"waits at", "spins at"}


@device
def add_and_max(block, counts):
    if thread_id() == 0:
        atomic_max(counts, 0, i64(5))  # here
    else:
        atomic_add(counts, 0, i64(1))  # here


def test_atomics_whose_order_matters_race():
    for finding in found(Race, add_and_max, ints(), lanes=2):
        assert lines_of(finding) == marked(add_and_max)
        assert "another result in the other order" in finding.advice


# --- runs


@device
def shifted_both_ways(block, a, b):
    a[thread_id()] = b[7 - thread_id()]


def test_a_seed_replays_its_run():
    texts = [str(found(Race, all_write_one, ints(), seeds=[seed])[0]) for seed in SEEDS for _ in range(2)]
    assert texts[0::2] == texts[1::2]
    assert len(set(texts)) > 1
    assert "seed 5 replays it" in texts[-1]


def test_accesses_are_counted_by_lane_and_array():
    counts = check(neighbours_with_a_barrier, 1, 4, ints(), seed=1)
    arena = [count for count in counts if count.shared]
    assert [(c.who, c.array, c.loads, c.stores) for c in arena] == [
        (f"block 0, lane {lane}", "block.shared", 1, 1) for lane in range(4)
    ]
    assert [(c.array, c.loads, c.stores) for c in counts if not c.shared] == [("out", 0, 1)] * 4


def test_an_array_passed_twice_is_one_and_overlapping_ones_are_refused():
    a = ints()
    found(Race, shifted_both_ways, a, a)
    with pytest.raises(ValueError, match="b and a are parts of one array"):
        check(shifted_both_ways, 1, 8, a, a[1:])


def test_launch_checks_on_the_python_target_alone():
    with pytest.raises(Race):
        launch(neighbours, 1, 8, ints(), target="python", check=True, seed=1)
    launch(neighbours_with_a_barrier, 1, 8, ints(), target="python", check=True)
    with pytest.raises(BlinkError, match=r"target=.python"):
        launch(neighbours, 1, 8, ints(), target="cpu", check=True)
