# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A token's journey
#
# You type a sentence, and a language model goes on with it, a *token* (a word, or a piece of one) at a time. In
# most servers a CPU program stands in the middle: for every token it asks the GPU for a step, waits, looks at the
# result, and asks for the next. blink_ref does without it. One program, the **persistent kernel**, is launched on
# the GPU once and never returns; requests come to it, and tokens leave it, through a piece of shared memory.
#
# This notebook follows one request all the way, and draws every picture from that very run. You need Python and
# NumPy. You need neither a GPU nor any knowledge of one: the same device code runs on CPU cores, and as plain
# Python, and here we use both. The last section asks three questions; keep them in mind while you read:
#
# 1. Which words does the NIC write?
# 2. When may a page be used again?
# 3. Where does a token wait?

# %% [markdown]
# ## 0. Installing
#
# Nothing happens here if blink_ref is installed already; in a checkout it is installed from there. On Colab, set
# `BLINK_REF_SOURCE` to the address of the repository that this notebook came from. On a machine with an NVIDIA GPU
# the cell also installs the CUDA target, of the
# version that the driver speaks.

# %%
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = os.environ.get("BLINK_REF_SOURCE", "")  # where there is no checkout around: git+https://..., or a wheel

if importlib.util.find_spec("blink_ref") is None:
    extra = ""
    if shutil.which("nvidia-smi"):
        said = subprocess.run("nvidia-smi", capture_output=True, text=True).stdout
        if version := re.search(r"CUDA Version: (1[23])", said):
            extra = f"[cuda{version[1]}]"
    checkout = Path.cwd().parent
    if not SOURCE and not (checkout / "blink_ref").is_dir():
        raise SystemExit(
            "open this notebook in a checkout's folder notebooks/, or set BLINK_REF_SOURCE to its address"
        )
    source = SOURCE or checkout.as_uri()
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"blink-ref{extra} @ {source}"], check=True)

# %% [markdown]
# ## 1. Three parties and a window
#
# - The **NIC** (a network card with a processor of its own; here, an object of this notebook) speaks text to the
#   world. It turns text into token ids, and back.
# - The **kernel** (on the GPU; here, on CPU cores) runs the model and decides who is served when.
# - The **host** loads the model, launches the kernel, and is gone. In this notebook we do its work by hand.
#
# NIC and kernel share one thing: the **window**, a block of memory in two halves. The NIC writes one half, the
# kernel the other, and each only reads what the other writes.
#
# We load the model that is part of the package: 1.3 million parameters that write like Jane Austen and know
# nothing. The sizes are chosen so small that they fit into pictures: a ring of 16 *slots* (places for requests),
# steps of at most 8 *rows* (positions computed at a time), a cache of 24 pages. `blocks` says that two CPU
# threads play the GPU. A serving engine chooses larger ones.

# %%
import inspect
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display
from matplotlib.patches import Patch, Rectangle

from blink_ref import simt
from blink_ref.engine import memory, settings
from blink_ref.engine.forward import forward
from blink_ref.engine.persistent import serve
from blink_ref.kvcache import pages
from blink_ref.model.config import ModelConfig
from blink_ref.model.reference import Reference
from blink_ref.model.store import resolve
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.model.weights import Weights
from blink_ref.nic.client import Nic
from blink_ref.nic.detokenize import Detokenizer
from blink_ref.ring.device import outbox_room
from blink_ref.ring.layout import DECODE, END, REASONS, STATES, unpack_record
from blink_ref.ring.window import Window
from blink_ref.scheduler import admit, arrivals, residence, schedule, state

folder = resolve("tiny")
config = ModelConfig.load(folder)
weights = Weights.load(folder, config)
tokenizer = Tokenizer.load(folder)

sizes = settings.choose(config, "cpu", sms=2, cache_bytes=1 << 26)
sizes = replace(sizes, slots=16, rows=8, running=4, reserved=0, pages=24, context=128)
print(f"{sizes.blocks} blocks, {sizes.slots} slots, {sizes.rows} rows a step, {sizes.running} requests at a time")
print(f"{sizes.pages} pages of {sizes.page_size} positions; a request has at most {sizes.context} positions")

# %% [markdown]
# Now the window. It is a file, and we map it twice, as two processes would: once as the engine, once as the NIC.
# The table shows what is in it. (`blink-ref layout` prints the same for a serving engine; a *word* is one
# number.)

# %%
layout = memory.window_layout(config, sizes)
engine_side = Window.create(layout, directory=Path(tempfile.mkdtemp()))
nic_side = Window.open(engine_side.path)

for half, dtype in ("NIC", layout.nic_half), ("GPU", layout.gpu_half):
    for name in dtype.names:
        field, offset = dtype.fields[name][:2]
        print(f"{half} writes  {name:<10} {field.itemsize:>7} bytes at {offset:>7}")

# %% [markdown]
# The NIC's view of the other half is read-only. Over a network, the card's memory registration says the same:

# %%
try:
    nic_side.gpu["state"][0] = 1
except ValueError as error:
    print("The NIC tried to write into the GPU's half:", error)

# %% [markdown]
# Last, the kernel's own arrays: what it keeps between steps (`slots`, `queue`), the plans of the step that runs,
# of the one before, which is also the next, and of one that may have been put aside (`plans`), how each slot's
# tokens are to be drawn (`wishes`), the cache of keys and values (`cache`), the model and its intermediate results
# (`act`). All are NumPy arrays in named tuples. Nothing is allocated after this.

# %%
view = memory.device_window(engine_side.nic, engine_side.gpu, layout)
arguments = memory.arguments(config, weights, sizes, view)
_, slots, queue, plans, wishes, cache, model, act, context = arguments
print("slots:", *slots._fields)
print("queue:", *queue._fields)
print("plans:", *plans._fields)
print("cache:", *cache._fields)

# %% [markdown]
# ## 2. The NIC writes a request
#
# We keep a copy of both halves, submit, and look at which words have changed. `Nic.submit` returns at once: it
# calls nobody, it only writes. (Of the request record, only what is not 0 is shown: 0 is "off", or "greedy".)

# %%
before = engine_side.nic.copy(), engine_side.gpu.copy()
nic = Nic(nic_side)
prompt = tokenizer.encode("When the letter came, Elizabeth was in the garden,")
journey = nic.submit(prompt, max_tokens=24)

print(len(prompt), "tokens:", [tokenizer.decode([token]) for token in prompt], "\n")
for old, new in zip(before, (engine_side.nic, engine_side.gpu), strict=True):
    for name in new.dtype.names:
        words = np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1))
        if len(words) and name == "request":
            record = new[name][words[0]]
            shown = {part: record[part].item() for part in record.dtype.names[:-1] if record[part]}
            print(f"request[{words[0]}]", shown)
        elif len(words):
            print(f"{name}[{words[0]}:{words[-1] + 1}]", new[name][words[0] : words[-1] + 1])

# %% [markdown]
# That is all: the prompt's tokens in the **arena**, one **request** record, and one word of the **doorbell**
# array. Nothing in the GPU's half has changed; the kernel does not run yet.
#
# The order matters. The doorbell is written *last*, with a store that may not overtake those before it
# ("release"). So whoever sees the new number, and reads with "acquire", sees the whole request. The number is the
# slot's *generation*: 1 for its first request, 2 for its next. That is how a slot's new request differs from its
# past.
#
# The function below draws the ring: a column a slot. The first line is the NIC's word, the other two are the
# kernel's: the generation that it last took, and the state that it shows. Where the first two differ, there is
# news.

# %%
COLOURS = plt.get_cmap("tab10").colors
GREY = (0.92, 0.92, 0.92)


def colour(slot):
    """A colour for a slot's request; the NIC hands out slots 0, 1, 2, ..."""
    return COLOURS[slot % len(COLOURS)]


def draw_ring(axes, title):
    lines = "doorbell (NIC)", "taken (kernel)", "state (kernel)"
    rung, taken = engine_side.nic["doorbell"], slots.taken
    for slot in range(sizes.slots):
        words = rung[slot], taken[slot], STATES[engine_side.gpu["state"][slot]]
        for line, word in enumerate(words):
            news = line < 2 and rung[slot] != taken[slot]
            face = "gold" if news else colour(slot) if taken[slot] else GREY
            axes.add_patch(Rectangle((slot, -line), 0.94, 0.9, color=face, alpha=1 if news else 0.5))
            axes.text(slot + 0.47, 0.45 - line, word, ha="center", va="center", fontsize=8 if line < 2 else 5)
    axes.set(xlim=(0, sizes.slots), ylim=(-2.1, 1), yticks=[0.45, -0.55, -1.55], yticklabels=lines, title=title)
    axes.set_xticks(np.arange(sizes.slots) + 0.47, range(sizes.slots))


_, axes = plt.subplots(figsize=(9, 1.8))
draw_ring(axes, "the ring after the doorbell has rung (yellow: news), before the kernel has looked")

# %% [markdown]
# ## 3. The scheduler sees it
#
# What follows is *device code*: functions marked `@device`, written in a small vocabulary (`thread_id()`,
# `barrier()`, `load_acquire(...)`), which are compiled for a GPU or a CPU. Called from Python, they are plain
# Python functions, run by the only *lane* (thread) of the only *block* (group of threads that share a little
# memory). So we can be the kernel for a while, and look around after each call, as in a debugger.
#
# First `look_around`: `scan` looks at all doorbells, and of each slot with news the request is copied out of the
# window, judged (one that can never run is to end), and given its *order*. The smallest order goes first.
# It is the number of the arrival (ours is number 0), moved back by a priority, and forward for an urgent request.

# %%
arrivals.look_around(view, slots, queue, wishes, cache, context, config.vocab, 0, False)
print("rung:", queue.rung[: queue.count[state.RUNG]], " waiting:", queue.count[state.WAITING])
print("slot 0: order", slots.order[0], " prompt", slots.prompt_len[0], "tokens, most to generate", slots.limit[0])
_, axes = plt.subplots(figsize=(9, 1.8))
draw_ring(axes, "the ring after the kernel has looked: no news")

# %% [markdown]
# The request waits: it has been seen, but has no place in the batch. Here is the first place to wait; a token's
# request leaves it when it is *admitted*.
#
# A request needs room in the **KV cache**: at every layer, the model keeps a key and a value for every position,
# for later positions to look at. The cache is cut into pages of 16 positions, and a request gets a list of pages,
# its *page table*. `admit` gives a place to whoever goes first, if there are pages for the tokens that it knows
# now and one more. It looks for pages that hold the beginning of its prompt already (section 8), but takes none:
# a page is taken when a position in it is to be computed. That is what `secure` does, here for 8 positions. (Pages
# that are not free can also be *cached* or *in limbo*: section 7.)


# %%
def page_counts():
    kinds = "free", "in limbo", "cached"
    print(*(f"{name}: {cache.count[n]} " for n, name in enumerate(kinds)), "of", cache.pages, "pages")


view.room[0] = outbox_room(view, 0, 1)  # records that the outbox has room for: the scheduler looks once a turn
admit.admit(view, slots, queue, cache, wishes, config.vocab)
assert queue.count[state.RUNNING] == 1
print("waiting:", queue.count[state.WAITING], " running:", queue.running[: queue.count[state.RUNNING]])
page_counts()
residence.secure(view, slots, queue, cache, 0, 8)
print("slot 0 knows", slots.known[0], "tokens, and has pages", cache.table[0, : slots.pages[0]])
page_counts()

# %% [markdown]
# (Nothing is set aside for the answer, so pages can run out. Then whoever goes last of the running gives its own
# back, and waits again with the tokens it knows: *preemption*, in `blink_ref/scheduler/residence.py`.)
#
# The picture: on the left the *page map*, each page in the colour of the slot that holds it; on the right the
# *page table*, which says where a slot's positions are. Which page it is makes no difference, so there is never a
# hole too small for anybody.


# %%
def draw_pages(title):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.2), width_ratios=[2, 3])
    table = {slot: cache.table[slot, : slots.pages[slot]].tolist() for slot in np.flatnonzero(slots.pages)}
    for page in range(cache.pages):
        x, y = page % 8, -(page // 8)
        hatch = "////" * cache.filed[page]
        left.add_patch(Rectangle((x, y), 0.92, 0.9, facecolor=GREY, edgecolor="darkgrey", hatch=hatch, lw=0))
        holders = [slot for slot in table if page in table[slot]]
        for n, slot in enumerate(holders):
            width = 0.92 / len(holders)
            left.add_patch(Rectangle((x + n * width, y), width, 0.9, color=colour(slot), alpha=0.6, lw=0))
        left.text(x + 0.46, y + 0.45, page, ha="center", va="center", fontsize=8)
    left.set(xlim=(0, 8), ylim=(-2.1, 1), xticks=[], yticks=[], title="page map")
    for line, slot in enumerate(table):
        for n, page in enumerate(table[slot]):
            at = n * sizes.page_size
            right.add_patch(Rectangle((at, -line), 15.5, 0.9, color=colour(slot), alpha=0.25))
            filled = min(max(slots.done[slot] - at, 0), sizes.page_size)
            right.add_patch(Rectangle((at, -line), filled, 0.9, color=colour(slot), alpha=0.6))
            right.text(at + 8, 0.45 - line, f"page {page}", ha="center", va="center", fontsize=8)
    right.set(xlim=(0, 64), ylim=(-max(len(table), 3) + 0.9, 1), xlabel="position")
    right.set_title("page table (dark: filled)")
    right.set_yticks(0.45 - np.arange(len(table)), [f"slot {slot}" for slot in table])
    figure.suptitle(title, y=1.1)


draw_pages("slot 0 has a page; nothing has been computed yet")

# %% [markdown]
# Last, the plan of the first step. `schedule` is one whole turn of the scheduler: it does again what we just did
# (and finds nothing new), then `make_draft` deals rows. A row is one position of one request. A request *knows*
# tokens, has *done* positions, and wants the rows between; the row of the last known token draws the next one.


# %%
def turn(engine=arguments):
    with np.errstate(over="ignore"):  # of hashes, which wrap around
        schedule.schedule(*engine, 1, 0)


def running_plan(engine=arguments):
    _, _, queue, plans, *_ = engine
    return state.plan_of(plans, queue.count[state.NOW])


turn()
plan = running_plan()
rows = plan.count[state.ROWS]
print("row  slot  position  token")
for row in range(rows):
    text = tokenizer.decode([plan.token[row]])
    print(f"{row:>3}  {plan.slot[row]:>4}  {plan.position[row]:>8}  {plan.token[row]:>5} {text!r}")
print("samples wanted:", plan.count[state.SAMPLES])

# %% [markdown]
# A step has 8 rows at most, so this one takes the first 8 tokens of the prompt, and nothing is to be drawn yet:
# the next token follows the *last* of the prompt. (A prompt taken in pieces does not stop others from being
# served.)
#
# ## 4. The kernels compute it
#
# Here is the whole of the persistent kernel. You have just been the line that says `schedule`.

# %%
print(inspect.getsource(serve))

# %% [markdown]
# All blocks run this function. Block 0 plans; then comes `grid_barrier`, at which every block waits for all the
# others, so that what any of them wrote before is seen by all of them after. Then all blocks compute. (`own_block`
# and `beside` are for an engine whose block 0 only schedules, beside the others. Ours has none.) We run one
# `forward` by hand, compiled for this machine's CPU, two blocks, each a thread. The first launch compiles.


# %%
def compute(engine=arguments):
    view, slots, queue, plans, *others, _ = engine
    needed = view, slots, queue, plans, queue.count[state.NOW], *others
    simt.launch(forward, sizes.blocks, sizes.lanes, *needed, target="cpu", shared=sizes.shared)


before = time.perf_counter()
compute()
print(f"first launch {time.perf_counter() - before:.1f} s")
before = time.perf_counter()
compute()
print(f"second launch {(time.perf_counter() - before) * 1e3:.2f} ms (it computed the same again)")

# %% [markdown]
# `forward` is a list of phases with a grid barrier after each, since each reads what other blocks wrote in the
# one before. This is the second place where a token waits: at a barrier, for the slowest block. (`stamp` keeps
# the time, and `watch` sees whether an urgent request has rung: section 8.)

# %%
print(inspect.getsource(forward))

# %% [markdown]
# ### Specification, device code, cost
#
# Every kernel comes in a file of three parts: a *specification* in NumPy, which says what is right; the *device
# function*, which says how it is done by many lanes; and its *cost*: bytes that must move and operations that
# must be done, from which you know how long it has to take. Here they stand side by side.

# %%
STYLE = "text-align:left; vertical-align:top; font-size:70%; white-space:pre; line-height:1.3; padding:0 1em"


def side_by_side(module, function):
    """The three parts of a kernel's file in one line of a table."""
    parts = {"specification": module.spec, "device function": function, "cost": module.cost}
    cells = "".join(
        f"<td style='{STYLE}'><b>{title}</b><br><code>{inspect.getsource(part).replace('<', '&lt;')}</code></td>"
        for title, part in parts.items()
    )
    display(HTML(f"<table><tr>{cells}</tr></table>"))


# %% [markdown]
# **Embedding.** The row's token picks a row of a matrix. Blocks share out the rows, and the lanes of a block the
# elements: lane i takes element i, i + n, i + 2n, ... (n lanes). Nearly all device code is of this shape.

# %%
from blink_ref.kernels import attention, embedding, linear, logits, mlp, rmsnorm, rope, sampling, tensors

side_by_side(embedding, embedding.embedding)

# %% [markdown]
# **RMSNorm** scales a row to mean square 1. The sum over the row needs all lanes: each warp (lanes in lockstep)
# adds its share, leaves it in memory that the block shares, and after the barrier everyone adds up the shares.

# %%
side_by_side(rmsnorm, rmsnorm.rmsnorm)

# %% [markdown]
# **RoPE** is how attention knows where a token stands: pairs of numbers turn by an angle that grows with the
# position. Remember this one: in section 10 you remove it.

# %%
side_by_side(rope, rope.rotate)

# %% [markdown]
# **Attention**: `project` (not shown) makes a query, a key and a value for each row and puts keys and values into
# the page that the page table names. `attend` compares the query with the keys of all positions up to the row's
# own, page by page, and mixes their values. Look for `cache.table[slot, n_page]`: there the page table is used.

# %%
side_by_side(attention, attention.attend)

# %% [markdown]
# **Linear layers** are where the time goes: every weight is read once for a step. A warp makes one number of the
# result at a time. The **MLP** does the same with two matrices at once.

# %%
side_by_side(linear, linear.add_linear)
side_by_side(mlp, mlp.gate_up)

# %% [markdown]
# **Logits and the draw.** The last matrix gives a score (*logit*) to each token of the vocabulary. Sampling adds
# random noise of the right shape to the scores and takes the largest: that is a draw from the softmax (the
# Gumbel-max trick), and a maximum is easy to share out. With temperature 0 there is no noise.

# %%
side_by_side(logits, logits.logits_and_draw)
side_by_side(sampling, sampling.score)

# %% [markdown]
# ### Do they do what they say, and how fast?
#
# The tiny model is too small to time. So we make one layer of the shape of SmolLM2-135M with random weights, and
# one row at position 255: a decode step. Each kernel is launched alone on the CPU and compared with its
# specification. To be timed it is run a hundred times within one launch, between two grid barriers and two looks
# at the clock. Time divided by cost is given as speeds: bytes a second, and operations a second.

# %%
from blink_ref.simt.vocabulary import clock_ns, thread_id

wide = replace(
    config, name="wide", vocab=16384, hidden=576, ffn=1536, layers=1, heads=9, kv_heads=3, head_dim=64, context=256
)
wide_weights = Weights.random(wide, seed=1)
wide_sizes = replace(settings.choose(wide, "cpu", sms=2, cache_bytes=1 << 26), slots=1, running=1)
_, _, _, plans_of_one, w, c, m, a, _ = memory.arguments(wide, wide_weights, wide_sizes, None)
p = state.plan_of(plans_of_one, 0)
D, F, V, HEADS, KV_HEADS, SIZE = wide.hidden, wide.ffn, wide.vocab, wide.heads, wide.kv_heads, wide.head_dim

draw = np.random.default_rng(0)
for array in (c.keys, c.values, a.x, a.q, a.gated):
    array[:] = draw.standard_normal(array.size)
c.table[0] = draw.permutation(c.pages)[: c.table.shape[1]]  # pages in any order
p.slot[0], p.position[0], p.best[0] = 0, 255, -(2**63)


def cached(pages):
    """Keys or values of the 256 positions, read out of their pages: [256, K, d]."""
    by_page = pages.reshape(c.pages, KV_HEADS, -1, SIZE)[c.table[0]]
    return by_page.transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, SIZE)


def matrix(which, outs, ins):
    return wide_weights.dense(int(wide_weights.matrix[0, which]), outs, ins)


def normed(row, n):
    return rmsnorm.spec(row, wide_weights.norm[n], wide.rms_eps)


def repeated(function):
    """A device function that runs another many times, and writes down the ns of each."""

    @simt.device
    def repeat(block, ns, args):
        for n in range(ns.shape[0]):
            simt.grid_barrier(block)
            begin = clock_ns()
            function(block, *args)
            simt.grid_barrier(block)
            if block.id == 0 and thread_id() == 0:
                ns[n] = clock_ns() - begin

    return repeat


def measure(function, cost, result, exact, *args):
    """Launch once, to compare; then run it a hundred times. The fastest counts: the others were disturbed."""
    simt.launch(function, 2, 1, *args, target="cpu", shared=wide_sizes.shared)
    error = np.abs(result - exact.reshape(-1)).max() / np.abs(exact).max()
    ns = np.zeros(100, np.int64)
    simt.launch(repeated(function), 2, 1, ns, args, target="cpu", shared=wide_sizes.shared)
    seconds, (moved, operations) = ns.min() / 1e9, cost
    print(
        f"{function.__name__:<16} {error:>8.0e} {seconds * 1e6:>8.0f} {moved / 1e6:>8.2f} {operations / 1e6:>8.2f}"
        f" {moved / seconds / 1e9:>8.1f} {operations / seconds / 1e9:>8.1f}"
    )


print("kernel              error       us       MB    Mflop     GB/s  Gflop/s")

x, q, attended = a.x[:D].copy(), a.q[: HEADS * SIZE], a.attended[: HEADS * SIZE]
straight = linear.spec(normed(x, 0)[None], matrix(tensors.Q, HEADS * SIZE, D))
exact = rope.spec(straight.reshape(1, HEADS, SIZE), m.rope[255:])
cost = linear.cost(1, (HEADS + 2 * KV_HEADS) * SIZE, D)
measure(attention.project, cost, q, exact, p, 1, 0, m, c, a.x, a.q)

exact = attention.spec(q.reshape(HEADS, SIZE), cached(c.keys), cached(c.values))
cost = attention.cost(1, 256, HEADS, KV_HEADS, SIZE)
measure(attention.attend, cost, attended, exact, p, 1, 0, m, c, a, False)

exact = x + linear.spec(a.gated[None, :F], matrix(tensors.DOWN, D, F))[0]
down = m.matrix[0, tensors.DOWN]
measure(linear.add_linear, linear.cost(1, D, F), a.x[:D], exact, a.gated, 1, m.weights, down, D, F, a.x)

a.x[:D] = x
exact = mlp.spec(normed(x, 1)[None], matrix(tensors.GATE, F, D), matrix(tensors.UP, F, D))
measure(mlp.gate_up, mlp.cost(1, D, F), a.gated[:F], exact, 1, 0, m, a.x, a.gated)

exact = logits.spec(normed(x, 2)[None], wide_weights.dense(wide_weights.head, V, D))
measure(logits.logits_and_draw, logits.cost(1, D, V), a.logits[:V], exact, p, 1, w, m, a.x, a.logits)

# %% [markdown]
# *error* is the largest difference from the specification, as a part of the largest number: float32 keeps seven
# digits, and what is left is rounding. A decode step computes little for what it reads (about one operation a
# byte), so the column to look at is GB/s. The kernels with weights all come to about the same: the speed at which
# the processor's cache gives weights that are in it from the run before. A whole model does not fit into a cache,
# and is read at the speed of memory; `blink-ref generate` prints which part of that it reached. `attend` is
# slower a byte, since its loops are short, and reads so little that a step hardly notices.
#
# ## 5. A token comes out
#
# Back to the journey. Eight of the prompt's positions are in the cache. We go on as we began: `step` below is one
# turn of the loop in `serve`, with the scheduler in Python, where we can look at it, and `forward` compiled. After
# each step we write down the plan that was run. (The whole of `serve` runs in section 9; compiled for the CPU, as
# `blink-ref generate` does it, it would take a minute or two the first time.)

# %%
history = []


def step():
    """Schedule, and compute what was planned; returns whether there was anything to do."""
    turn()
    if ran := queue.count[state.GO] == state.RUN:
        compute()
        keep_plan()
    return ran


def keep_plan():
    plan = running_plan()
    n = plan.count[state.ROWS]
    prompt_row = plan.position[:n] < slots.prompt_len[plan.slot[:n]]
    layers = range(plan.count[state.FIRST_LAYER], plan.count[state.INTERRUPTED] or config.layers)
    rows = list(zip(plan.slot[:n].tolist(), plan.position[:n].tolist(), prompt_row.tolist(), strict=True))
    history.append((layers, rows))


keep_plan()  # the first step
step()
print("second step: positions", [position for _, position, _ in history[1][1]])
print("samples wanted:", running_plan().count[state.SAMPLES], " outbox:", engine_side.gpu["outbox"][:3])

# %% [markdown]
# The second step took the rest of the prompt, up to its last position, and so a sample was wanted. The token has
# been drawn, but the outbox is empty still: block 0 publishes it when it next comes to schedule, at the start of
# the next step.

# %%
step()
word = int(engine_side.gpu["outbox"][0])
record = unpack_record(word, 0, layout.outbox)
print(f"outbox[0] = {word:#018x}: tag {word >> 48}, {record} = {tokenizer.decode([record.value])!r}")

# %% [markdown]
# A record is one 8-byte word, written by one store: *tag, slot, kind, value*. The tag is the number of the lap
# around the outbox ring. The NIC knows which tag it expects next; when it is there, the whole record is there,
# since a word is never seen by halves. So the NIC needs no lock and no flag. It polls:

# %%
detokenizer = Detokenizer(tokenizer)
pieces = []


def read_outbox(most=None):
    """What the NIC does all day."""
    for handle, token, reason, _ in nic.poll():
        if handle is journey:
            pieces.append(detokenizer.finish() if token is None else detokenizer.add(token))
        elif token is None:
            print(f"slot {handle.slot}: {REASONS[reason]}")


read_outbox()
print("text so far:", pieces, "\nconsumed:", engine_side.nic["consumed"][0])

# %% [markdown]
# The third place where a token waits: in the outbox, for the NIC. After reading, the NIC writes how many records
# it has taken (`consumed`), its last word in our list. The kernel never writes over a record that has not been
# taken: it plans no row whose token might find no room, and so a slow NIC delays its own requests, and loses
# nothing.
#
# ## 6. Others join
#
# While our request runs, two more come. Nobody stops for them: a plan is made anew at every step, of whoever is
# there (*continuous batching*).

# %%
for n in range(40):
    if n == 3:
        second = nic.submit(tokenizer.encode("Mr. Darcy"), max_tokens=12, temperature=0.8, seed=7)
    if n == 8:
        third = nic.submit(tokenizer.encode("The sky over the hills of Kent was"), max_tokens=6)
    if n == 12:
        draw_pages(f"who has which pages before step {len(history) + 1}")
    if not step():
        break
    read_outbox()
read_outbox()
print("our text:", "".join(pieces))

# %% [markdown]
# ("slot 1: length" says that an END came, and why: there are as many tokens as were asked for.)
#
# The batch over time: a column a launch of `forward`, a box a row, in the colour of its slot, with its position
# in it. Hatched boxes are of prompts. A step never has more than 8 rows; decoding requests get theirs first, a
# prompt gets what is left.


# %%
def draw_batch(first=1):
    _, axes = plt.subplots(figsize=(11, 3))
    for column, (layers, rows_of_step) in enumerate(history[first - 1 :], first):
        if len(layers) < config.layers:
            text = "layer " + " to ".join(f"{layer}" for layer in sorted({layers[0], layers[-1]}))
            axes.text(column, len(rows_of_step) + 0.2, text, ha="center", fontsize=6)
        for row, (slot, position, of_prompt) in enumerate(rows_of_step):
            box = Rectangle((column - 0.45, row), 0.9, 0.9, facecolor=colour(slot), alpha=0.5, lw=0)
            axes.add_patch(box)
            if of_prompt:
                box.set(hatch="////", edgecolor="white")
            axes.text(column, row + 0.45, position, ha="center", va="center", fontsize=6)
    seen = sorted({slot for _, rows_of_step in history[first - 1 :] for slot, *_ in rows_of_step})
    axes.legend(handles=[Patch(color=colour(slot), alpha=0.5, label=f"slot {slot}") for slot in seen])
    axes.set(xlim=(first - 1, len(history) + 1), ylim=(0, sizes.rows + 1), xlabel="launch", ylabel="row")


draw_batch()

# %% [markdown]
# And the outbox, in the order in which it was written. A box is a record, in the colour of its slot; an END is a
# request's last record. Requests are mixed as they came: one poll brings everybody's new tokens.


# %%
def draw_outbox():
    _, axes = plt.subplots(figsize=(11, 1.7))
    index = 0
    while record := unpack_record(int(engine_side.gpu["outbox"][index % layout.outbox]), index, layout.outbox):
        x, y = index % 25, -(index // 25)
        ends = record.kind == END
        axes.add_patch(Rectangle((x, y), 0.92, 0.9, color=colour(record.slot), alpha=1 if ends else 0.5))
        text = "END" if ends else tokenizer.decode([record.value])
        axes.text(x + 0.46, y + 0.45, text, ha="center", va="center", fontsize=7)
        index += 1
    axes.set(xlim=(0, 25), ylim=(-((index - 1) // 25) - 0.1, 1), xticks=[], yticks=[])
    axes.set_title(f"{index} records written, {engine_side.nic['consumed'][0]} consumed")


draw_outbox()

# %% [markdown]
# ## 7. The end, and what is used again
#
# The END record tells the NIC that the slot, and the prompt's place in the arena, are its own again. Before the
# kernel wrote it, it let go of the request's pages.

# %%
_, axes = plt.subplots(figsize=(9, 1.8))
draw_ring(axes, "all three have ended")
page_counts()
print("the free page to be taken next:", cache.free[cache.count[pages.FREE] - 1])
draw_pages("nobody holds a page, and some are cached (hatched)")

# %% [markdown]
# When nobody holds a page any more, what becomes of it?
#
# - A page that is not full is **free**.
# - A full one stays **cached**: a later request may begin with the same tokens. Only when there is no free page is
#   a cached one taken, the one that has been unused for longest.
#
# Pages are let go by block 0, between two steps, behind the barrier that ended the last step which read them. So
# nobody reads a free page, and it can be handed out at once, without waiting and without being erased. (With one
# exception, the pages **in limbo**: a step may be *paused*, section 8, and its request cancelled meanwhile. That
# step still goes on and writes to those that are not full; they are free when it has ended.)
#
# The next request finds old keys in its pages, and never looks: it reads only positions up to its own, and it has
# written all of those itself, or found them cached. We can put the worst there is into every free page
# (not-a-number, which spoils whatever it touches), and ask again. Its prompt is shorter than a page, so it finds
# nothing cached, and computes all:

# %%
for kept in (cache.keys, cache.values):
    by_page = kept.reshape(config.layers, cache.pages, -1)
    by_page[:, cache.free[: cache.count[pages.FREE]]] = np.nan

again = nic.submit(prompt, max_tokens=24)
tokens = []
while nic.running:
    step()
    tokens += [token for _, token, *_ in nic.poll() if token is not None]
print("slot", again.slot, "generation", again.generation)
print("the same text:", tokenizer.decode(tokens) == "".join(pieces))

# %% [markdown]
# Slot 0 has been rung a second time, with generation 2. Is the text *right*, too? The package has the model a
# second time, in a hundred lines of NumPy. Temperature 0, so no chance is involved, and both must say the same
# tokens:

# %%
expected = Reference(config, weights).generate(prompt, 24)
print("as the NumPy model says:", tokens == expected)
assert tokens == expected

# %% [markdown]
# ## 8. Alike, and urgent
#
# Keys and values of a position depend on the tokens up to it and on nothing else. So two requests whose prompts
# begin alike can hold the same pages: a full page is filed under a hash of all tokens up to its end, and `admit`
# looks there. (A hash can lie; the tokens are compared, too.) The second prompt arrives when the first has been
# computed:

# %%
start_of_section = len(history) + 1
rain = "It rained all that week, and the road to the village was so bad that nobody came to the house"
alike = [nic.submit(tokenizer.encode(rain + " but Anne"), max_tokens=8)]
while slots.state[alike[0].slot] != DECODE:
    step()
alike.append(nic.submit(tokenizer.encode(rain + " except Charles"), max_tokens=8))
turn()
for handle in alike:
    known, done = slots.known[handle.slot], slots.done[handle.slot]
    print(f"slot {handle.slot}: pages {cache.table[handle.slot, :3]}, {done} of {known} tokens are done")
draw_pages("two requests that begin alike, before the second has computed anything")

# %% [markdown]
# The second request has the first two pages of the other, and computes the rest of its prompt only. Pages that
# several hold are never written: they are full. The third pages are each their own.
#
# The step is planned, with rows of both. Now, before it is computed, comes a request with `urgent=True`. Behind
# its doorbell the NIC counts up one more word, `urgent`, and the kernel looks at that word between layers:

# %%
urgent = nic.submit(tokenizer.encode("Make haste"), max_tokens=4, urgent=True)
compute()
keep_plan()
print(f"interrupted before layer {running_plan().count[state.INTERRUPTED]} of {config.layers}")

while step():
    read_outbox()
read_outbox()
draw_batch(start_of_section)

# %% [markdown]
# One layer was computed. `schedule` then put the plan and its rows' intermediate results aside, and planned a
# step for the urgent request alone; when that had its first token, the paused step went on in layer 1, and
# nobody's text is any different. (Real steps take milliseconds, and an urgent request can ring in the middle of
# one. Ours take microseconds; so we put ourselves between plan and step.)
#
# ## 9. Inside, while it runs
#
# On the `python` target every lane is a Python thread. `breakpoint()` in a device function stops there, and
# `python -m pdb` works (try it in a terminal). A notebook that runs from top to bottom cannot stop to be asked,
# so we do what a breakpoint does: put a function that prints in the place of one that does not. `simt.swap` does
# that for as long as the `with` lasts, in whatever calls the function, on every target. Here is what block 0 does
# when a request is admitted, in a kernel of 2 blocks of 4 lanes. The prompt begins as those two did, which have
# ended; their pages are cached, so it starts with 2 pages and 32 positions done:

# %%
start = simt.device(admit.start.python)  # the original, under a name of its own


def tell(when, slot):
    said = {name: getattr(slots, name)[slot].item() for name in ("state", "known", "done", "pages")}
    print(when, said | {"state": STATES[said["state"]]})


@simt.device
def start_and_tell(window, slots, queue, cache, slot, found):
    tell("before:", slot)
    start(window, slots, queue, cache, slot, found)
    tell("after: ", slot)
    print("called by", " < ".join(frame.function for frame in inspect.stack()[2:10:2]))


nic.submit(tokenizer.encode(rain + " before"), max_tokens=1)
with simt.swap(admit.start, start_and_tell):
    simt.launch(serve, 2, 4, *arguments, 0, 1, target="python", shared=sizes.shared)
print(
    [(tokenizer.decode([token]) if token is not None else REASONS[reason]) for _, token, reason, _ in nic.poll()]
)

# %% [markdown]
# That was the whole persistent kernel, 8 lanes of it: the same source, with the same arrays, which went on where
# we had stopped. (The `python` target is some hundred times slower; it is for looking.)
#
# ### A barrier that one lane misses
#
# `barrier()` makes the lanes of a block wait for each other. *All* of them must come to it. This sum is wrong:
# only lane 0 waits. On a GPU it may hang, or give the right answer until the day it does not. The `python` target
# says what is the matter:

# %%
from blink_ref.simt.on_python import Divergence
from blink_ref.simt.vocabulary import barrier, block_threads, f32


@simt.device
def bad_sum(block, x, out):
    block.shared[thread_id()] = x[thread_id()]
    if thread_id() == 0:
        barrier()
        total = f32(0.0)
        for lane in range(block_threads()):
            total += block.shared[lane]
        out[0] = total


x, out = np.arange(4, dtype=np.float32), np.zeros(1, np.float32)
try:
    simt.launch(bad_sum, 1, 4, x, out, target="python")
except Divergence as error:
    print("Divergence:", error)


# %% [markdown]
# Move `barrier()` one line up and to the left, and all lanes meet:


# %%
@simt.device
def good_sum(block, x, out):
    block.shared[thread_id()] = x[thread_id()]
    barrier()
    if thread_id() == 0:
        total = f32(0.0)
        for lane in range(block_threads()):
            total += block.shared[lane]
        out[0] = total


simt.launch(good_sum, 1, 4, x, out, target="python")
print("0 + 1 + 2 + 3 =", out[0])

# %% [markdown]
# ## 10. Three things to change
#
# Each is one small function, put in another's place by `simt.swap` and undone at the end of the `with`. Change
# them, and run the cells again. Where `forward` calls the function, it is compiled anew, which takes some seconds;
# the scheduler, here as before, runs as Python.

# %%
from blink_ref.simt.vocabulary import i64


def answers(*requests, running=4):
    """Serve (text, tokens, temperature) requests in a fresh engine; [(text, answer)] in order of their ends."""
    small = replace(sizes, running=running)
    own_window = Window.create(memory.window_layout(config, small), directory=Path(tempfile.mkdtemp()))
    own_view = memory.device_window(own_window.nic, own_window.gpu, own_window.layout)
    own_nic, own = Nic(own_window), memory.arguments(config, weights, small, own_view)
    came = {own_nic.submit(tokenizer.encode(text), n, t, seed=1): (text, []) for text, n, t in requests}
    ended = []
    while own_nic.running:
        turn(own)
        compute(own)
        for handle, token, reason, _ in own_nic.poll():
            if reason is None:
                came[handle][1].append(token)
            else:
                ended.append((came[handle][0], tokenizer.decode(came[handle][1])))
    own_window.unlink()
    return ended


# %% [markdown]
# ### The order of admission
#
# With one place in the batch, requests are served in the order in which they came: `take_request` gives each the
# number of its arrival for its order. Let it be the length of the prompt instead. (An order has the slot in its
# last 16 bits.)

# %%
take_request = simt.device(arrivals.take_request.python)


@simt.device
def shortest_first(window, slots, queue, sampling, slot):
    take_request(window, slots, queue, sampling, slot)
    slots.order[slot] = (i64(slots.prompt_len[slot]) << 16) | slot


three = ("It is a long and winding way to Bath", 4, 0.0), ("A shorter way", 4, 0.0), ("Go", 4, 0.0)
print("as they came:  ", [text for text, _ in answers(*three, running=1)])
with simt.swap(arrivals.take_request, shortest_first):
    print("shortest first:", [text for text, _ in answers(*three, running=1)])
print("undone:        ", [text for text, _ in answers(*three, running=1)])

# %% [markdown]
# The average wait is shorter, but as long as short ones come, the long one never runs. `take_request` adds 256
# times a request's priority to the number of its arrival. Why does nobody starve then? Mend `shortest_first`.
#
# ### The draw
#
# `score` says what a token's logit counts for: with a temperature, it is divided by it and gets its noise. Leave
# out the noise, and the most likely token always wins, whatever the temperature.


# %%
@simt.device
def noiseless(logit, temperature, seed, position, token):
    return logit


hot = ("Elizabeth was", 16, 1.0)
print("with noise:   ", answers(hot)[0][1])
with simt.swap(sampling.score, noiseless):
    print("without:      ", answers(hot)[0][1])
print("temperature 0:", answers(("Elizabeth was", 16, 0.0))[0][1])

# %% [markdown]
# ### Where a token stands
#
# Without RoPE's rotation, attention cannot tell near from far, nor before from after; the weights were trained
# with it. The function is one line. Watch the text fall apart:


# %%
@simt.device
def unrotated(a, b, cos, sin):
    return a, b


plain = ("Elizabeth was", 32, 0.0)
print("rotated:  ", answers(plain)[0][1])
with simt.swap(rope.rotate, unrotated):
    print("unrotated:", answers(plain)[0][1])
print("undone:   ", answers(plain)[0][1])

# %% [markdown]
# ## 11. On a GPU
#
# The same source, compiled to the GPU's instructions: a block becomes a thread block on one of the GPU's
# processors, a warp has 32 lanes in place of one, and `row_dot` reads 16 bytes a lane. On a machine with a GPU,
# this cell runs the good sum there; elsewhere it says what is missing.

# %%
import warnings

from blink_ref.simt.launch import why_no_cuda

if reason := why_no_cuda():
    print("No GPU here:", reason)
else:
    x, out = np.arange(64, dtype=np.float32), np.zeros(1, np.float32)
    warnings.simplefilter("ignore")  # numba says that one block cannot fill a GPU; so it is
    simt.launch(good_sum, 1, 64, x, out, target="cuda")
    print("0 + 1 + ... + 63 =", out[0], "on the GPU")

# %% [markdown]
# We were the kernel, step by step. A serving engine launches it once, without bounds, and then its host process
# does nothing: stop that process with SIGSTOP, and tokens keep coming. Clean up, by the host's last act: set the
# stop word, let the kernel see it, and remove the window.

# %%
engine_side.nic["stop"][0] = 1
simt.launch(serve, 2, 4, *arguments, 0, 0, target="python", shared=sizes.shared)
engine_side.unlink()
print(
    "steps:",
    engine_side.gpu["heartbeat"][1],
    " state of the engine:",
    ["STARTING", "SERVING", "STOPPED"][engine_side.gpu["heartbeat"][2]],
)

# %% [markdown]
# ## Can you say?
#
# 1. **Which words does the NIC write?** (Section 2, the list of changed words; section 5, `consumed`; section 8,
#    `urgent`; and the table "who writes which word" in `docs/architecture.md`, which also has those that you did
#    not see change: `cancel`, `trace` and `stop`.)
# 2. **When may a page be used again?** (Section 7; "When may a page be used again" in `docs/architecture.md`.)
# 3. **Where does a token wait?** (Three places: section 3, before its request is admitted, or admitted again;
#    section 4, at a barrier; section 5, in the outbox. Also in `docs/architecture.md`, after the table of the
#    walk.)
#
# To go on: `blink_ref/engine/persistent.py` is the kernel, `docs/architecture.md` is the map, and `docs/traps.md`
# is what cost us hours.
