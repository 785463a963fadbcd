"""Every PTX text the project uses, with a line each on what it does.

Operands are ``$0, $1, ...``: results first, then arguments, as LLVM's inline assembly numbers them.
The PTX ISA manual describes the instructions ("Memory Consistency Model", "ld", "st", "atom", "nanosleep").
"""

SCOPES = ("cta", "gpu", "sys")
"""The scope qualifier for vocabulary.BLOCK, GPU and SYSTEM."""

# Waits until all threads of the block are here. The unaligned form: it counts threads wherever they
# stand, where `bar.sync` wants the lanes of a warp to stand at one place.
BARRIER = "barrier.sync 0;"

# Waits until all lanes of the warp are here, and orders their memory accesses.
WARP_BARRIER = "bar.warp.sync 0xffffffff;"

# Nanoseconds since boot, one clock for the whole GPU; it ticks every 32 ns to 1 us.
GLOBAL_TIMER = "mov.u64 $0, %globaltimer;"

# Lets the scheduler run other warps; between 0 and twice the given nanoseconds.
NANOSLEEP = "nanosleep.u32 $0;"

# This thread's number in its block, and the block's number of threads. Read anew at each use: kept, all that
# follows from them would be computed at the kernel's start, and hold registers throughout.
THREAD = "mov.u32 $0, %tid.x;"
THREADS = "mov.u32 $0, %ntid.x;"

# A 64-bit copy that the compiler has to make where it stands.
COPY = "mov.b64 $0, $1;"

# 1 / sqrt($1), nearly.
ONE_OVER_ROOT = "rsqrt.approx.ftz.f32 $0, $1;"

# At the head of a loop: ptxas leaves it as it is, where unrolled it would want too many registers.
NO_UNROLL = '.pragma "nounroll";'

# 16 bytes of weights that nothing writes while the kernel runs: the read-only path, and not kept in
# L1, which they would only sweep. From 8.0 on, L2 keeps them for less time than anything else.
LOAD_WEIGHTS = "ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
LOAD_WEIGHTS_ONCE = """{
.reg .b64 policy;
createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {$0, $1, $2, $3}, [$4], policy;
}"""

# A float32 whose upper half is the upper (or lower) half of a 32-bit word: the bfloat16s in a pair.
HIGH_HALF = "and.b32 $0, $1, 0xffff0000;"
LOW_HALF = "shl.b32 $0, $1, 16;"

# The bits of the bfloat16 nearest to a float32, ties to even; from 8.0 on.
NARROW = "cvt.rn.bf16.f32 $0, $1;"

# An mbarrier at a shared address begins phase 0; then the asynchronous proxy can see it.
MBARRIER_INIT = """
mbarrier.init.shared::cta.b64 [$0], $1;
fence.proxy.async.shared::cta;
"""

# An arrival at an mbarrier, which releases to the block; the second adds to the bytes of the phase first.
MBARRIER_ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [$0];"
MBARRIER_EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"

# Whether the phase of parity $2 is complete, which it may wait for a while; acquires if so.
MBARRIER_TRY = """{
.reg .pred complete;
mbarrier.try_wait.parity.shared::cta.b64 complete, [$1], $2;
selp.u32 $0, 1, 0, complete;
}"""

# $2 bytes from global [$1] to shared [$0], counted on the mbarrier at [$3] when they are there.
COPY_ASYNC = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"

# The same of what L2 is to keep for less time than anything else.
COPY_ONCE = """{
.reg .b64 policy;
createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], policy;
}"""

# The word $1 goes to [$0]. From 8.0 on, L2 keeps it for longer than anything else.
STORE_TO_STAY = """{
.reg .b64 policy;
createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
st.global.L2::cache_hint.u32 [$0], $1, policy;
}"""

# Orders ordinary accesses before it with asynchronous copies after it, in both memories. Without a space, ptxas
# adds a fence of all the GPU's accesses, which waits for all that the lane has on its way.
ASYNC_FENCE = "fence.proxy.async.shared::cta; fence.proxy.async.global;"

# An mbarrier's word in shared memory, where the hardware has no mbarriers that count bytes.
LOAD_SHARED = "ld.acquire.cta.shared.u64 $0, [$1];"
SWAP_SHARED = "atom.cas.acq_rel.cta.shared.b64 $0, [$1], $2, $3;"


# A warp's 16 x 16 bfloat16 fragment $4..$7 times its 16 x 8 one $8, $9, added to 16 x 8 float32 ("mma.m16n8k16").
MULTIPLY_ADD = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)

# The same of float16.
MULTIPLY_ADD_F16 = MULTIPLY_ADD.replace(".bf16.bf16.", ".f16.f16.")

# Four 8 x 8 matrices of 16-bit numbers; lane l says where row l % 8 of matrix l / 8 lies in shared memory.
LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"

# The same, each of the four transposed.
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"

# Two float32 as bfloat16, in one word, the first one lower; and in another what is missing of them.
SPLIT = """{
.reg .b32 bits;
.reg .f32 even, odd;
cvt.rn.bf16x2.f32 $0, $3, $2;
shl.b32 bits, $0, 16;
mov.b32 even, bits;
sub.rn.f32 even, $2, even;
and.b32 bits, $0, 0xffff0000;
mov.b32 odd, bits;
sub.rn.f32 odd, $3, odd;
cvt.rn.bf16x2.f32 $1, odd, even;
}"""

# Two float32 as float16, in one word, the first one lower; what is beyond the largest becomes the largest.
NARROW_TWO = "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;"

# The two bfloat16 of a word as float16 likewise, the lower one lower.
NARROW_BF16 = """{
.reg .b32 low, high;
shl.b32 low, $1, 16;
and.b32 high, $1, 0xffff0000;
cvt.rn.satfinite.f16x2.f32 $0, high, low;
}"""

# 2 to the power of a float32, off by 2**-22 of it; 0 where that is below 2**-126.
POWER_OF_TWO = "ex2.approx.ftz.f32 $0, $1;"

# The lower, or the upper, halves of two words as one, that of the first one lower.
LOWER_HALVES = "prmt.b32 $0, $1, $2, 0x5410;"
UPPER_HALVES = "prmt.b32 $0, $1, $2, 0x7632;"

# 16 bytes from global [$1] to shared [$0], asynchronously; the same, of weights; a group of copies ends; none is
# on its way any more.
COPY_PIECE = "cp.async.cg.shared.global [$0], [$1], 16;"
COPY_WEIGHTS = """{
.reg .b64 policy;
createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, policy;
}"""
END_OF_GROUP = "cp.async.commit_group;"
WAIT_FOR_GROUPS = "cp.async.wait_group 0;"

# 16 bytes out of shared memory, in the order of the asynchronous copies that brought them.
LOAD_PIECE = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"

# 16 bytes to shared memory.
STORE_PIECE = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"


def wgmma(sums: int, fragments: int) -> str:
    """Four warps' 64 x 16 float16 fragments times as many of 16 x (2 * sums), added to float32.

    Of `sums` sums a lane, both results and arguments, then: descriptors of the first two fragments, and what is
    added to each for the next ("wgmma.mma_async"). It waits for those begun before, not for these. None has a
    predicate: each would wait for the one before.
    """
    a, b, step_a, step_b = (f"${2 * sums + n}" for n in range(4))
    listed = ", ".join(f"${n}" for n in range(sums))
    one = f"wgmma.mma_async.sync.aligned.m64n{2 * sums}k16.f32.f16.f16 {{{listed}}}, a, b, 1, 1, 1, 0, 0;"
    move = f"add.s64 a, a, {step_a};\nadd.s64 b, b, {step_b};"
    all_of_them = f"\n{move}\n".join([one] * fragments)
    return f"""{{
.reg .b64 a, b;
mov.b64 a, {a};
mov.b64 b, {b};
wgmma.fence.sync.aligned;
{all_of_them}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1;
}}"""


WGMMA_WAIT = "wgmma.wait_group.sync.aligned 0;"


def fence(scope: int) -> str:
    """Between relaxed loads and what comes after them, as if they had acquired."""
    return f"fence.acq_rel.{SCOPES[scope]};"


def load(order: str, scope: int, bits: int) -> str:
    """An ordered load: `order` is relaxed or acquire."""
    return f"ld.{order}.{SCOPES[scope]}.global.u{bits} $0, [$1];"


def load_four(scope: int) -> str:
    """Four neighbouring 32-bit words by one relaxed load: each whole, all in no order."""
    return f"ld.relaxed.{SCOPES[scope]}.global.v4.u32 {{$0, $1, $2, $3}}, [$4];"


def store(order: str, scope: int, bits: int) -> str:
    """An ordered store. `order` is relaxed, or release: visible after all that this thread wrote or saw before."""
    return f"st.{order}.{SCOPES[scope]}.global.u{bits} [$0], $1;"


def atomic(operation: str, scope: int, kind: str) -> str:
    """A read-modify-write, acquire and release; `kind` is the operand's type, such as u32 or s64."""
    return f"atom.{operation}.acq_rel.{SCOPES[scope]}.global.{kind} $0, [$1], $2;"


def compare_and_swap(scope: int, bits: int) -> str:
    """If [$1] equals $2, it becomes $3; $0 is what was there."""
    return f"atom.cas.acq_rel.{SCOPES[scope]}.global.b{bits} $0, [$1], $2, $3;"
