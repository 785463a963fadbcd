"""What device code becomes on GPUs that are not here: PTX, and machine code by ptxas, for three generations."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from types import FunctionType

import numba
import numpy as np
import pytest

import blink_ref
from blink_ref.errors import BlinkError
from blink_ref.simt import assembler, capability, device, grid, grid_barrier, vocabulary
from blink_ref.simt.vocabulary import (
    BLOCK,
    GPU,
    SYSTEM,
    Tile,
    acquire_fence,
    arena_view,
    async_fence,
    atomic_add,
    atomic_cas,
    atomic_max,
    awaited,
    awaited_copy,
    awaited_four,
    awaited_mix,
    awaited_sum,
    barrier,
    bf16,
    block_copy,
    block_dots,
    block_put,
    block_scale,
    block_threads,
    clock_ns,
    copy_async,
    divide,
    dot,
    dots_ask,
    dots_forget,
    exp,
    f32,
    f32_of_bits,
    fp16,
    fragment_dots,
    fragment_put,
    heads_mix,
    heads_pay,
    heads_weigh,
    i32,
    i64,
    lane_any,
    lane_broadcast,
    lane_id,
    lane_max,
    lane_sum,
    load_acquire,
    load_relaxed,
    load_relaxed_four,
    mbarrier_arrive,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    mbarriers,
    mix_of_fours,
    narrow_put,
    opaque,
    packed_floats,
    publish,
    rank,
    rank_index,
    relax,
    row_dot,
    row_dots,
    row_dots_of_two,
    row_mix,
    store_relaxed,
    store_release,
    sum_of_fours,
    thread_id,
    tile_ask,
    tile_attend,
    tile_begin,
    tile_end,
    tile_put,
    tile_take,
    tiles_pay,
    u32,
    unpublish,
    warp_barrier,
    warp_id,
    warp_width,
    warps,
    widen,
)

on_cuda = pytest.importorskip(
    "blink_ref.simt.on_cuda", reason="needs numba-cuda and ptxas: pip install 'blink-ref[cuda13]'"
)
PACKAGE = Path(blink_ref.__file__).parent
GENERATIONS = pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0)], ids=["7.5", "8.0", "9.0"])


def vector(dtype):
    return numba.typeof(np.zeros(1, dtype))


FLOATS, WORDS = vector(np.float32), vector(np.int32)


def compiled(fn, *types, lanes=128, cc=(9, 0)):
    return on_cuda.compile_to_ptx(fn, types, lanes, cc)


@device
def use_every_word(block, floats, halves, stored, words, longs):
    i = i64(warp_id()) * warp_width() + lane_id() + thread_id() + warps() + block_threads()
    floats[i] = bf16(stored[i]) + fp16(halves[i]) + widen(stored[i]) + f32_of_bits(u32(words[i]))
    barrier()
    warp_barrier()
    floats[i] += lane_sum(floats[i]) + lane_max(floats[i]) + lane_broadcast(floats[i], 3)
    words[i] = lane_any(words[i] > 0)
    store_release(words, i, load_relaxed(words, i) + load_acquire(words, i))
    store_relaxed(words, i, words[i] + load_relaxed_four(words, i << 2)[2])
    acquire_fence(SYSTEM)
    atomic_add(words, i, i32(1))
    atomic_max(longs, i, rank(exp(floats[i]), i))
    atomic_cas(longs, i, i64(0), rank_index(longs[i]) + clock_ns())
    q, r = divide(opaque(i), i64(7))
    floats[i] += row_dot(stored, q, floats, r, i64(64)) + row_dot(floats, q, floats, r, i64(64))
    floats[i] += row_dot(halves, q, floats, r, i64(64)) + dot(floats, q, floats, r, i64(64))
    row_dots(stored, q, floats, r, i64(5), i64(64), floats, r)
    row_dots(floats, q, floats, r, i64(5), i64(64), floats, r)
    row_dots_of_two(stored, q, r, floats, r, i64(5), i64(64), floats, r, q)
    row_mix(floats, q, i64(8), floats, r, i64(64), floats, i)
    row_mix(floats, q, i64(8), stored, r, i64(64), floats, i)
    floats[i] += dot(floats, q, stored, r, i64(64))
    narrow_put(floats, q, floats[i])
    narrow_put(stored, q, floats[i])
    narrow_put(halves, q, floats[i])
    bar = mbarriers(block.shared, i64(0), i64(1))
    mbarrier_init(bar, 0, i64(1))
    mbarrier_arrive(bar, 0)
    mbarrier_expect_bytes(bar, 0, i64(16))
    async_fence()
    copy_async(arena_view(block.shared, i64(4), i64(8), stored), 0, stored, q, i64(8), bar, 0)
    mbarrier_wait(bar, 0, i64(1))
    block_copy(floats, q, floats, r, i64(64))
    block_scale(block.shared, q, floats, r, f32(2.0), floats, i, i64(64))
    if tiles_pay(halves):
        tile = Tile(q, r, i64(8), r, i64(64), i64(64), i64(64), i64(0), i64(64))
        dots_ask(block.shared, i64(0), halves, floats, tile, True)
        dots_forget(block.shared, i64(0), halves, tile)
        block_dots(block.shared, i64(0), halves, floats, tile)
    tile_put(block.shared, q, r, i64(64), i64(16), floats, i, f32(0.5))
    tile_ask(block.shared, q, i64(64), i64(16), floats, i)
    tile_ask(block.shared, q, i64(64), i64(16), stored, i)
    tile_take(block.shared, q, r, i64(64), i64(16), floats, i, q)
    tile_take(block.shared, q, r, i64(64), i64(16), stored, i, q)
    held = tile_begin(block.shared, q, i, i64(64))
    held = tile_attend(block.shared, held, q, q, i, r, i64(40), q, i64(2), i64(64))
    tile_end(block.shared, held, q, r, i, i64(64))
    block_put(floats, packed_floats(q), floats[i], floats[r], f32(1.0), f32(2.0))
    fragment_put(floats, packed_floats(q), floats[i], floats[r], f32(1.0), f32(2.0))
    fragment_dots(block.shared, q, arena_view(block.shared, i64(4), i64(8), halves), r, i64(3), floats, r, q, True)
    fours, mixed = sum_of_fours(block.shared, q, r, i64(8)), mix_of_fours(floats, i, block.shared, q, r, i64(8))
    floats[i] = fours[0] + fours[3] + mixed[1] + awaited_mix(floats, i, floats, q << 2, i64(8), r)[2]
    if heads_pay(stored):
        cached = arena_view(block.shared, i64(4), i64(32 * 64), stored)
        weights = heads_weigh(block.shared, q, cached, q, i64(8), i64(64), i)
        heads_mix(block.shared, q, cached, weights, i64(8), i64(64), i)
    unpublish(floats, i)
    publish(floats, i, awaited(floats, i) + awaited_four(floats, q << 2)[1] + awaited_sum(floats, q, i64(64)))
    awaited_copy(block.shared, q, floats, r, i)
    relax(i)


EVERY_WORD = (FLOATS, vector(np.int16), vector(np.uint16), WORDS, vector(np.int64))


def test_the_function_that_uses_every_word_does():
    words = {
        name
        for name, value in vars(vocabulary).items()
        if isinstance(value, FunctionType) and value.__module__ == vocabulary.__name__ and name[0] != "_"
    }
    assert words <= set(use_every_word.python.__code__.co_names)


@GENERATIONS
def test_every_word_compiles_with_no_double_precision_spill_or_local_memory(cc):
    ptx = compiled(use_every_word, *EVERY_WORD, cc=cc)
    assert f".target {capability.architecture(cc)}\n" in ptx
    report = assembler.assemble(ptx, cc)
    assert report.faults() == []
    assert report.cc == f"{cc[0]}.{cc[1]}"
    assert 16 <= report.registers <= 255
    assert report.max_threads == 65536 // report.registers // 32 * 32


@device
def sum_doubles_by_mistake(block, x):
    acc = 0.0
    for i in range(x.shape[0]):
        acc += x[i]
    x[0] = acc


@device
def sum_floats(block, x):
    acc = f32(0.0)
    for i in range(x.shape[0]):
        acc += x[i]
    x[0] = acc


def test_a_sum_that_starts_from_a_python_float_is_reported_as_double_precision():
    (fault,) = assembler.assemble(compiled(sum_doubles_by_mistake, FLOATS), (9, 0)).faults()
    assert re.fullmatch(r"\d+ double-precision \(\.f64\) instructions: write f32\(0\.0\), not 0\.0", fault)
    assert assembler.assemble(compiled(sum_floats, FLOATS), (9, 0)).faults() == []


@device
def meet_in_branches(block, words):
    if words[0] > 0:
        barrier()
        words[1] = 1
    else:
        words[2] = 2
        barrier()
    barrier()


@GENERATIONS
def test_a_barrier_is_the_unaligned_form_once_for_each_in_the_source(cc):
    ptx = compiled(meet_in_branches, WORDS, cc=cc)
    assert len(re.findall(r"\bbarrier\.sync 0;", ptx)) == 3
    # the launcher has one of its own, which all threads reach together
    assert len(re.findall(r"\bbar\.sync\b", ptx)) == len(
        re.findall(r"\bbar\.sync\b", compiled(sum_floats, FLOATS))
    )


@device
def meet_all(block, words):
    grid_barrier(block)
    words[0] += 1
    grid.grid_barrier(block)


def test_the_grid_barrier_releases_arrivals_and_acquires_the_count():
    ptx = compiled(meet_all, WORDS)
    assert ptx.count("atom.add.acq_rel.gpu.global.u32") == 2
    assert ptx.count("ld.acquire.gpu.global.u32") >= 2
    assert len(re.findall(r"\bbarrier\.sync 0;", ptx)) == 4


def in_scope(scope):
    @device
    def access(block, words, longs):
        words[0] = load_relaxed(words, 1, scope) + load_acquire(words, 2, scope)
        words[1] = load_relaxed_four(words, 4, scope)[3]
        store_release(words, 3, i32(1), scope)
        store_relaxed(words, 7, i32(1), scope)
        atomic_add(longs, 4, i64(1), scope)
        atomic_max(longs, 5, i64(1), scope)
        atomic_cas(words, 6, i32(0), i32(1), scope)

    return access


@pytest.mark.parametrize(("scope", "name"), [(BLOCK, "cta"), (GPU, "gpu"), (SYSTEM, "sys")])
def test_ordered_accesses_carry_their_scope(scope, name):
    ptx = compiled(in_scope(scope), WORDS, vector(np.int64))
    for text in (
        f"ld.relaxed.{name}.global.u32",
        f"ld.relaxed.{name}.global.v4.u32",
        f"ld.acquire.{name}.global.u32",
        f"st.release.{name}.global.u32",
        f"st.relaxed.{name}.global.u32",
        f"atom.add.acq_rel.{name}.global.u64",
        f"atom.max.acq_rel.{name}.global.s64",
        f"atom.cas.acq_rel.{name}.global.b32",
    ):
        assert ptx.count(text) == 1, text


@device
def access_without_scope(block, words):
    words[0] = load_relaxed(words, 1) + load_acquire(words, 2)
    store_release(words, 3, words[4])


def test_the_scope_of_an_access_is_the_gpu_if_not_said():
    ptx = compiled(access_without_scope, vector(np.uint64))
    for text in ("ld.relaxed.gpu.global.u64", "ld.acquire.gpu.global.u64", "st.release.gpu.global.u64"):
        assert text in ptx


@device
def some_word(block, out):
    out[0] = 1


@device
def a_sum_below(block, out):
    use_a_sum(out)


@device
def use_a_sum(out):
    out[0] = lane_sum(out[0]) + lane_max(out[0])


def test_a_single_lane_is_for_functions_without_work_for_a_warp():
    assert on_cuda.warp_work(some_word) == []
    assert on_cuda.warp_work(a_sum_below) == ["lane_max", "lane_sum"]
    with pytest.raises(BlinkError, match="a_sum_below> needs whole warps, for lane_max, lane_sum; launch it"):
        on_cuda.start(a_sum_below, 1, 1, (np.zeros(1),), 64)


@device
def raise_unsigned(block, words):
    atomic_max(words, 0, words[1])


def test_the_maximum_of_unsigned_numbers_is_taken_unsigned():
    assert "atom.max.acq_rel.gpu.global.u32" in compiled(raise_unsigned, vector(np.uint32))


@device
def weigh(block, w, x, out):
    total = row_dot(w, i64(0), x, i64(0), i64(out.shape[0]))
    if lane_id() == 0:
        out[warp_id()] = total


@GENERATIONS
@pytest.mark.parametrize("dtype", [np.uint16, np.int16])
def test_sixteen_bit_weights_are_read_sixteen_bytes_at_a_time_past_the_first_cache(dtype, cc):
    ptx = compiled(weigh, vector(dtype), FLOATS, FLOATS, cc=cc)
    assert f"ld.global.nc.L1::no_allocate{'.L2::cache_hint' * (cc >= (8, 0))}.v4.u32" in ptx
    assert not re.findall(r"ld\.global\S*\.[usb](8|16)\b", ptx)
    assert not re.findall(r"ld\.(global|shared)\.f32", ptx)  # nor is an activation read alone
    assert assembler.assemble(ptx, cc).faults() == []


def test_float_weights_are_read_sixteen_bytes_at_a_time():
    ptx = compiled(weigh, FLOATS, FLOATS, FLOATS)
    assert re.findall(r"ld\.global\S*\.v4\.\w?32", ptx)
    assert not re.findall(r"ld\.global\.f32", ptx)


@device
def pick(block, a, out):
    out[thread_id()] = a[i64(out[thread_id()])]


def test_no_index_is_asked_whether_it_counts_from_the_end():
    ptx = compiled(pick, FLOATS, vector(np.int64))
    assert "ld.global.f32" in ptx
    assert not re.findall(r"\b(selp|shr)\b", ptx)


@device
def divide_all(block, a):
    q, r = divide(a[0], a[1])
    a[2] = q + r


def test_divide_is_a_division_of_32_bits():
    ptx = compiled(divide_all, vector(np.int64))
    assert "div.u32" in ptx
    assert not re.findall(r"(div|rem)\.[us]64", ptx)


@device
def grow(x):
    return x + 1


@device
def call_through_a_module(block, words):
    words[0] = grow(words[0]) + i32(grid.first_of_share(10, 0, 2))


def test_compiling_for_one_gpu_leaves_nothing_behind_for_the_next():
    first = compiled(call_through_a_module, WORDS, cc=(7, 5))
    assert ".target sm_90" in compiled(call_through_a_module, WORDS, cc=(9, 0))
    again = compiled(call_through_a_module, WORDS, cc=(7, 5))
    assert ".target sm_75" in again
    # numba numbers what it compiles; all else is the same
    assert len(again) == pytest.approx(len(first), abs=200)


def test_a_kernel_is_bound_to_the_lanes_it_is_launched_with():
    assert ".maxntid 512, 1, 1" in compiled(sum_floats, FLOATS, lanes=512)


# --- ptxas

PTX = """
.version 7.5
.target sm_75
.address_size 64
.visible .entry hold(.param .u64 p) .maxntid 32, 1, 1 .maxnreg {registers}
{{
    .reg .f32 %f<64>; .reg .b64 %rd<3>;
    {local}
    ld.param.u64 %rd1, [p];
    cvta.to.global.u64 %rd2, %rd1;
    {body}
    ret;
}}
"""


@device
def attend_alone(block, cache, at, n):
    places = arena_view(block.shared, at, n, cache)
    weights = heads_weigh(block.shared, at, places, at, n, n, n)
    heads_mix(block.shared, at, places, weights, n, n, n)


def test_loops_that_must_stay_rolled_do():
    """The words' loops have their products once: eight of scores, and sixteen of sums."""
    ptx = compiled(attend_alone, vector(np.uint16), numba.int64, numba.int64)
    assert ptx.count("mma.sync.aligned") == 8 + 16


def keep_many(n, registers):
    """A kernel that holds n numbers at a time in `registers` registers."""
    loads = [f"ld.volatile.global.f32 %f{i}, [%rd2+{4 * i}];" for i in range(n)]
    stores = [f"st.volatile.global.f32 [%rd2+{4 * i}], %f{n - 1 - i};" for i in range(n)]
    return PTX.format(registers=registers, local="", body="\n".join(loads + stores))


def test_spilled_registers_are_counted():
    free, tight = (assembler.assemble(keep_many(60, registers), (7, 5)) for registers in (128, 32))
    assert (free.spill_bytes, free.faults()) == (0, [])
    assert tight.spill_bytes > 0
    assert any("spilled registers" in fault for fault in tight.faults())


def test_products_of_four_warps_that_wait_for_each_other_are_counted(monkeypatch, tmp_path):
    """A ptxas that says of a kernel what this one has said of the persistent kernel."""
    said = (
        "(C7519) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program dependence"
    )
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f"#!/bin/sh\necho 'ptxas info    : Used 30 registers'\necho '{said}'\n")
    ptxas.chmod(0o755)
    assert assembler.assemble(keep_many(60, 128), (9, 0)).serialized == 0
    monkeypatch.setattr(assembler, "find_ptxas", lambda: ptxas)
    report = assembler.assemble("", (9, 0))
    assert (report.registers, report.serialized) == (30, 1)
    assert report.faults() == ["wgmma instructions that wait for each other"]


def test_text_that_is_no_ptx_is_refused_in_the_words_of_ptxas():
    with pytest.raises(BlinkError, match=r"ptxas refuses the kernel for sm_90a: .*fatal"):
        assembler.assemble("no ptx", (9, 0))


def test_ptxas_is_that_of_the_wheel_not_the_one_on_the_path(monkeypatch, tmp_path):
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = assembler.find_ptxas()
    assert found != other
    assert found.parts[-4] == "nvidia"


def test_a_missing_ptxas_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(BlinkError, match=r"ptxas is not installed; pip install 'blink-ref\[cuda13\]' brings it"):
        assembler.find_ptxas()


# --- what the sources and the project say


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_numba_cuda_is_imported_in_one_file_only():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(f"{name}.".startswith("numba.cuda.") for name in imports(ast.parse(path.read_text())))
    }
    assert importers == {"simt/numba_cuda.py"}


def test_what_simt_builds_on_is_pinned_and_the_plain_install_has_no_cuda():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    plain, extras = project["dependencies"], project["optional-dependencies"]
    assert re.fullmatch(r"numba==0\.\d+\.\*", next(d for d in plain if d.startswith("numba")))
    # numba-cuda 0.30 calls np.row_stack, which numpy 2.5 has no more
    assert next(d for d in plain if d.startswith("numpy")).endswith("<2.5")
    assert not [d for d in plain if "cuda" in d or "nvidia" in d]
    for name in ("cuda12", "cuda13"):
        assert re.fullmatch(r"numba-cuda\[cu1[23]\]==0\.\d+\.\*", extras[name][0])
