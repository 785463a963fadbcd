"""Lays out everything the persistent kernel works on, as NumPy arrays in named tuples."""

from typing import Any

import numpy as np

from ..kernels import flash_items, handed, packing, stream, tiles, work_list
from ..kernels.staging import MOST_LISTED, MOST_ROWS
from ..kernels.tensors import Activations, Model
from ..kvcache import pages
from ..model.config import ModelConfig, rope_table
from ..model.weights import STORED_AS, Weights
from ..ring.device import Window
from ..ring.layout import MOST_LOGPROBS, Layout
from ..scheduler import state
from ..simt import aligned
from ..simt.vocabulary import DOTS_ROWS, HEADS
from .settings import CUDA_LANES, Settings


def window_layout(config: ModelConfig, settings: Settings) -> Layout:
    """The window for a model: arena for the prompts of a full batch, but at most a million tokens."""
    arena = min(1 << 20, settings.slots * settings.context)
    s = settings
    return Layout(s.slots, 1, arena, context=s.context, vocab=config.vocab, pages=s.pages, page_size=s.page_size)


def device_window(nic: Any, gpu: Any, layout: Layout) -> Window:
    """The kernel's view of the window's two halves, given as NumPy records."""
    fields = {name: nic[name] for name in nic.dtype.names if name != "header"}
    fields |= {name: gpu[name] for name in gpu.dtype.names}
    workers = layout.workers
    return Window(
        **fields,
        written=np.zeros(workers, np.int64),
        read=np.zeros(workers, np.uint32),
        room=np.zeros(workers, np.int64),
        dealt=np.zeros(workers, np.int64),
        reserved=np.zeros(workers, np.int64),
        workers=workers,
        share_bits=(layout.slots // workers).bit_length() - 1,
        outbox_bits=layout.outbox.bit_length() - 1,
        arena_size=layout.arena,
    )


def device_model(
    config: ModelConfig,
    weights: Weights,
    context: int,
    in_tiles: int = 0,
    stream_rows: int = 0,
    packed: np.ndarray | None = None,
    table: np.ndarray | None = None,
) -> Model:
    """The model as the kernels see it; the weights are not copied. For the last four see :class:`Model`."""
    norm = aligned(weights.norm.size, np.float32)
    norm[:] = weights.norm.reshape(-1)
    return Model(
        weights=weights.flat,
        matrix=weights.matrix,
        norm=norm,
        rope=rope_table(config, context),
        eos=np.array(config.eos_ids, np.int32),
        embed=weights.embed,
        head=weights.head,
        layers=config.layers,
        hidden=config.hidden,
        ffn=config.ffn,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        eps=np.float32(config.rms_eps),
        tiles=in_tiles,
        packed=packed,
        stream=np.zeros((1, 8), np.int32) if table is None else table,
        stream_rows=stream_rows,
    )


def tiles_fit(config: ModelConfig, weights: Weights, settings: Settings) -> bool:
    """Whether steps of many rows can be computed in tiles; on CUDA, half of the warps of a whole block copy."""
    on_cuda = settings.target == "cuda"
    if settings.running > MOST_LISTED or (on_cuda and settings.lanes != CUDA_LANES):
        return False
    return tiles.fits(config, weights.flat.dtype, settings.shared, on_cuda)


def stream_fits(config: ModelConfig, weights: Weights, settings: Settings) -> bool:
    """Whether steps of few rows can be computed from a stream of packed weights."""
    if settings.stream_rows == 0 or settings.warps > stream.MOST_WARPS:
        return False
    sizes = settings.stream_rows, settings.warps, config.head_dim, settings.page_size
    needed = stream.arena(*sizes, halves=settings.target == "cuda")
    return settings.shared >= needed and packing.fits(config, weights.flat.dtype)


def chunks_fit(config: ModelConfig, settings: Settings) -> bool:
    """Whether the attention of single rows can be cut in chunks."""
    room = settings.shared
    if settings.stream_rows:
        room = stream.room(settings.shared, settings.warps, settings.stream_rows * config.head_dim)
    return settings.kv_dtype == "bfloat16" and flash_items.fits(config, settings.page_size, room)


def activations(
    config: ModelConfig,
    rows: int,
    samples: int,
    tiles_at_once: int = 1,
    most_chunks: int = 0,
    streamed: int = 0,
    blocks: int = 1,
) -> Activations:
    """Buffers for steps of up to `rows` rows and `samples` samples, poisoned with NaN.

    `tiles_at_once`: the number of `blocks`, where linear layers are computed in tiles. `most_chunks`: see
    :class:`Activations`. `streamed`: the most rows of a step that is computed from the stream.
    """
    heads, of_layer = config.heads * config.head_dim, handed.size(config, streamed)
    units = max(samples, MOST_ROWS) * flash_items.units_of(config) if most_chunks else 1
    chunks = max(units * most_chunks, config.layers * flash_items.MOST_AWAITED * blocks if streamed else 0)
    of_chunk = flash_items.of_chunk(config.head_dim, flash_items.heads_of_unit(config))
    return Activations(
        x=poisoned(rows * config.hidden),
        aside=poisoned(rows * config.hidden),
        normed=poisoned(rows * config.hidden),
        squares=poisoned(rows * (config.hidden // 4)),
        handed=poisoned((1 + config.layers) * of_layer),
        of_layer=of_layer,
        q=poisoned(rows * heads),
        attended=poisoned(rows * heads),
        gated=poisoned(rows * config.ffn),
        pieces=poisoned(tiles_at_once * DOTS_ROWS * DOTS_ROWS),
        met=np.zeros(2 * tiles_at_once, np.int32),
        partial=poisoned(chunks * of_chunk if most_chunks else 8),
        arrived=np.zeros(units * HEADS, np.int32),
        most_chunks=most_chunks,
        logits=poisoned(samples * config.vocab),
        adjusted=poisoned(samples * config.vocab),
        counts=np.zeros(samples * config.vocab, np.int32),
        chosen_logprob=poisoned(samples * (1 + MOST_LOGPROBS)),
        likely=np.zeros(samples * MOST_LOGPROBS, np.int32),
    )


def poisoned(n: int) -> np.ndarray:
    """n floats that nothing may read before it has written them."""
    buffer = aligned(n, np.float32)
    buffer.fill(np.nan)
    return buffer


def arguments(
    config: ModelConfig, weights: Weights, settings: Settings, window: Window, pack: bool = True
) -> tuple[Any, ...]:
    """Everything that ``serve(block, ...)`` takes between its block and its bounds, in order.

    Without `pack`, :attr:`Model.packed` is only allocated: whoever places it on a GPU fills it there.
    """
    s = settings
    in_tiles = s.tiles if tiles_fit(config, weights, s) else 0
    streamed = s.stream_rows if stream_fits(config, weights, s) else 0
    in_chunks = (in_tiles > 0 or streamed > 0) and chunks_fit(config, s)
    most_chunks = -(-s.context // work_list.CHUNK) if in_chunks else 0
    in_fragments = in_tiles > 0 or streamed > 0 or s.target == "cuda"
    packed, table = aligned(8, np.int16) if in_fragments else None, None
    if in_tiles or streamed:
        table = packing.table(config, s.blocks - s.scheduler_block, s.warps)
        packed = aligned(packing.size(table), np.int16)
        if pack:
            packed[:] = packing.spec(config, weights)
    slots, queue = state.allocate(
        s.slots, s.running, s.context, s.reserved, s.layer_preemption, s.scheduler_block, s.rows, s.rehearsals
    )
    return (
        window,
        slots,
        queue,
        state.allocate_plans(s.rows, s.running),
        state.allocate_sampling(s.slots),
        pages.allocate(
            config.layers,
            config.kv_heads,
            config.head_dim,
            s.slots,
            s.context,
            s.pages,
            s.page_size,
            s.sharing,
            STORED_AS[s.kv_dtype],
        ),
        device_model(config, weights, s.context, in_tiles, streamed, packed, table),
        activations(config, s.rows, s.running, s.blocks if in_tiles else 1, most_chunks, streamed, s.blocks),
        s.context,
    )
