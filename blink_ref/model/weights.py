"""A model's weights as the engine wants them: one flat array, every matrix aligned, 16-bit kept."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig, read_json
from blink_ref.model.tensorfile import (
    STORED,
    Tensor,
    from_bf16,
    from_float32,
    open_safetensors,
    save_safetensors,
    to_bf16,
    to_float32,
)

__all__ = ["Weights", "from_bf16", "layer_shapes", "save_safetensors", "to_bf16"]

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")
# A matrix starts at a multiple of 8 elements: 16 bytes, one vector load, also of the 16-bit types.
STEP = 8
STORED_AS = {"bfloat16": STORED["BF16"], "float16": STORED["F16"], "float32": STORED["F32"]}


@dataclass
class Weights:
    """Offsets are in elements of ``flat``; each matrix is row-major [out, in], as stored.

    flat    uint16 (bfloat16 bits), int16 (float16 bits) or float32, 1-D, its memory 16-byte aligned
    matrix  int64 [layers, 7]: offsets of q, k, v, o, gate, up, down, multiples of 8
    norm    float32 [2*layers + 1, hidden]: row 2l comes before layer l's attention, row 2l+1 before
            its MLP, the last row before the logits
    embed   offset of the embedding [vocab, hidden]
    head    offset of the matrix of the logits [vocab, hidden]; ``embed`` where the two are tied
    """

    flat: np.ndarray
    matrix: np.ndarray
    norm: np.ndarray
    embed: int
    head: int

    @classmethod
    def load(cls, path: Path, config: ModelConfig) -> "Weights":
        """Map the safetensors of the directory ``path``, one file or shards with an index.

        Nothing is copied when one file holds every matrix in one dtype and aligned (what
        ``save_safetensors`` writes). Otherwise the matrices are copied once, and rounded to
        ``config.dtype`` if the file mixes dtypes.

        Raises BlinkError: a file is missing or truncated; a tensor is missing, of the wrong shape, or
        of a dtype that is not served.
        """
        tensors = _open(path)
        matrices = [_find(tensors, path, name, shape) for name, shape in _matrices(config)]
        norms = [_find(tensors, path, name, (config.hidden,)) for name in _norms(config)]
        norm = np.stack([to_float32(tensor.view()) for tensor in norms])
        flat, offsets = _mapped(matrices) if _can_map(matrices) else _copied(matrices, config.dtype)
        return cls(flat, *_by_layer(offsets, config, norm))

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, dtype: str = "bfloat16", scale: float = 0.02) -> "Weights":
        """Matrices drawn from a normal of deviation ``scale``, norms around 1; same seed, same bits."""
        draw = np.random.default_rng(seed)
        shapes = [shape for _, shape in _matrices(config)]
        flat, offsets = _allocate([rows * cols for rows, cols in shapes], STORED_AS[dtype])
        for start, (rows, cols) in zip(offsets, shapes, strict=True):
            values = draw.standard_normal(rows * cols, np.float32)
            values *= scale
            flat[start : start + rows * cols] = from_float32(values, flat.dtype)
        norm = draw.uniform(0.5, 1.5, (2 * config.layers + 1, config.hidden)).astype(np.float32)
        return cls(flat, *_by_layer(offsets, config, norm))

    def dense(self, offset: int, rows: int, cols: int) -> np.ndarray:
        """The matrix at ``offset`` as float32 [rows, cols]: a view if stored so, else converted."""
        return to_float32(self.flat[offset : offset + rows * cols]).reshape(rows, cols)

    def named(self, config: ModelConfig) -> dict[str, np.ndarray]:
        """Views under the names of a Hugging Face checkpoint, for ``save_safetensors``."""
        offsets = [*self.matrix.ravel(), self.embed, self.head]
        matrices = {
            name: self.flat[start : start + rows * cols].reshape(rows, cols)
            for start, (name, (rows, cols)) in zip(offsets, _matrices(config), strict=False)
        }
        return matrices | dict(zip(_norms(config), self.norm, strict=True))


def layer_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """[out, in] of q, k, v, o, gate, up, down: the columns of ``Weights.matrix``."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden, config.ffn
    attention = (query, hidden), (key, hidden), (key, hidden), (hidden, query)
    return *attention, (ffn, hidden), (ffn, hidden), (hidden, ffn)


def _matrices(config: ModelConfig) -> list[tuple[str, tuple[int, int]]]:
    """Name and shape of each matrix: layer by layer in the order of MATRICES, embedding, head if untied."""
    listed = [
        (f"model.layers.{layer}.{name}.weight", shape)
        for layer in range(config.layers)
        for name, shape in zip(MATRICES, layer_shapes(config), strict=True)
    ]
    ends = [EMBED] if config.tied else [EMBED, HEAD]
    return listed + [(name, (config.vocab, config.hidden)) for name in ends]


def _norms(config: ModelConfig) -> list[str]:
    layers = [f"model.layers.{layer}.{name}.weight" for layer in range(config.layers) for name in NORMS]
    return [*layers, NORM]


def _open(path: Path) -> dict[str, Tensor]:
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return open_safetensors(single)
    if not index.exists():
        raise BlinkError(
            f"{path} has neither {single.name} nor {index.name}; other formats are not read, so save the "
            "model as safetensors"
        )
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not all(Path(str(shard)).name == shard for shard in shard_of.values()):
        raise BlinkError(f"{index}: weight_map must name, for each tensor, a file beside it; fetch it again")
    shards = {shard: open_safetensors(path / shard) for shard in sorted(set(shard_of.values()))}
    return {name: shards[shard][name] for name, shard in shard_of.items() if name in shards[shard]}


def _find(tensors: dict[str, Tensor], path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise BlinkError(f"{path}: tensor {name} is missing; config.json asks for it with shape {shape}")
    if tensor.shape != shape:
        raise BlinkError(f"{path}: tensor {name} has shape {tensor.shape}; config.json asks for {shape}")
    if tensor.dtype not in STORED:
        raise BlinkError(f"{path}: tensor {name} is stored as {tensor.dtype}; only {', '.join(STORED)} are served")
    return tensor


def _can_map(matrices: list[Tensor]) -> bool:
    first = min(matrices, key=lambda tensor: tensor.start)
    if first.dtype not in ("BF16", "F16", "F32") or first.start % 16:
        return False
    step = STEP * STORED[first.dtype].itemsize
    return all(
        tensor.data is first.data and tensor.dtype == first.dtype and (tensor.start - first.start) % step == 0
        for tensor in matrices
    )


def _mapped(matrices: list[Tensor]) -> tuple[np.ndarray, list[int]]:
    # Offsets count from the first matrix, since the file's data need not start at a whole element.
    stored = STORED[matrices[0].dtype]
    base = min(tensor.start for tensor in matrices)
    end = max(tensor.start + tensor.view().nbytes for tensor in matrices)
    flat = matrices[0].data[base:end].view(stored)
    return flat, [(tensor.start - base) // stored.itemsize for tensor in matrices]


def _copied(matrices: list[Tensor], declared: str) -> tuple[np.ndarray, list[int]]:
    present = {STORED[tensor.dtype] for tensor in matrices}
    stored = present.pop() if len(present) == 1 else STORED_AS[declared]
    if stored == np.float64:
        stored = STORED_AS[declared]
    views = [tensor.view().reshape(-1) for tensor in matrices]
    flat, offsets = _allocate([view.size for view in views], stored)
    for start, view in zip(offsets, views, strict=True):
        kept = view if view.dtype == stored else from_float32(to_float32(view), stored)
        flat[start : start + view.size] = kept
    return flat, offsets


def _allocate(sizes: Iterable[int], stored: np.dtype) -> tuple[np.ndarray, list[int]]:
    """An array whose memory starts at a multiple of 64 bytes, and the offset of each matrix in it."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // STEP) * STEP
    room = np.zeros(end * stored.itemsize + 64, np.uint8)
    skip = -room.ctypes.data % 64
    return room[skip : skip + end * stored.itemsize].view(stored), offsets


def _by_layer(
    offsets: list[int], config: ModelConfig, norm: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The fields of Weights after ``flat``; the last offset is the head's, or the tied embedding's."""
    inner = config.layers * len(MATRICES)
    matrix = np.array(offsets[:inner], np.int64).reshape(config.layers, len(MATRICES))
    return matrix, norm, offsets[inner], offsets[-1]
