"""A Llama model in Hugging Face layout as a BF16 GGUF file, for llama.cpp: the same weights, bit for bit.

The inverse of ``blink_ref/model/gguf_import.py``; the file is kept in the user's cache folder.
"""

import json
import os
from pathlib import Path

import gguf
import numpy as np

from blink_ref.config import cache_dir
from blink_ref.model.config import ModelConfig
from blink_ref.model.gguf_import import CONTROL_TOKEN, IN_LAYER, TOP
from blink_ref.model.weights import Weights

NORMAL_TOKEN = 1
GGUF_NAME = {theirs: name for name, theirs in (TOP | IN_LAYER).items()}


def bf16_gguf(model: Path) -> Path:
    """The GGUF file of the model in folder `model`, written at the first call."""
    made = cache_dir() / "peers" / f"{model.name}-bf16.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")
        _write(model, unfinished)
        unfinished.rename(made)
    return made


def _write(model: Path, file: Path) -> None:
    config = ModelConfig.load(model)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(config.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config.vocab)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text("utf-8")))
    for name, tensor in Weights.load(model, config).named(config).items():
        _add_tensor(writer, name, tensor, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict) -> None:
    ids = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([CONTROL_TOKEN if i in special else NORMAL_TOKEN for i in range(len(ids))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_add_bos_token(False)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, config: ModelConfig) -> None:
    stem = name.removesuffix(".weight")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    their_name = f"{prefix}{GGUF_NAME[stem]}.weight" if prefix else GGUF_NAME[name]
    if tensor.dtype == np.float32:
        writer.add_tensor(their_name, tensor)
        return
    if stem.endswith(("q_proj", "k_proj")):
        tensor = _interleaved(tensor, config.head_dim)
    stored = np.ascontiguousarray(tensor).view(np.uint8)
    writer.add_tensor(their_name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _interleaved(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's row order of q and k: it rotates row 2i with 2i+1, Hugging Face i with i+d/2."""
    rows, cols = matrix.shape
    return matrix.reshape(rows // head_dim, 2, head_dim // 2, cols).swapaxes(1, 2).reshape(rows, cols)
