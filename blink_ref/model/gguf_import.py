"""A GGUF file of a Llama model to a directory in Hugging Face layout.

GGUF is llama.cpp's format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised
matrices are dequantised and rounded to bfloat16. Only byte-level BPE of SmolLM's kind is known.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from blink_ref.errors import BlinkError
from blink_ref.model.tensorfile import save_safetensors, to_bf16

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


class _Fields:
    """The key-value pairs of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self.reader = reader

    def __getitem__(self, key: str) -> Any:
        if key not in self.reader.fields:
            raise BlinkError(f"the GGUF file lacks {key}; fetch it again")
        return self.reader.fields[key].contents()


def convert(source: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    """Write config, weights and tokenizer of the GGUF file ``source`` into the existing folder ``target``.

    ``progress(done, total)`` is called after each tensor. Raises BlinkError: another architecture,
    tokenizer or tensor than expected.
    """
    reader = GGUFReader(source)
    fields = _Fields(reader)
    kind = fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("llama", "gpt2", "smollm"):
        raise BlinkError(f"{source.name} is of kind {kind}; only ('llama', 'gpt2', 'smollm') is converted")
    tensors = {}
    for done, tensor in enumerate(reader.tensors, 1):
        name, values = _tensor(tensor, fields)
        tensors[name] = to_bf16(values)
        progress(done, len(reader.tensors))
    save_safetensors(target / "model.safetensors", tensors)
    _write_json(target / "config.json", _config(fields, tied="lm_head.weight" not in tensors))
    _tokenizer(fields).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))


def _tensor(tensor: Any, fields: _Fields) -> tuple[str, np.ndarray]:
    """Hugging Face name and float32 values of a GGUF tensor (whose shape is listed innermost first)."""
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    if tensor.name in TOP:
        return TOP[tensor.name], values
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
    if not found or found[2] not in IN_LAYER:
        raise BlinkError(f"tensor {tensor.name} of the GGUF file is unknown; only Llama's are converted")
    if found[2] == "attn_q":
        values = _half_split(values, fields["llama.attention.head_count"])
    elif found[2] == "attn_k":
        values = _half_split(values, fields["llama.attention.head_count_kv"])
    return f"model.layers.{found[1]}.{IN_LAYER[found[2]]}.weight", values


def _half_split(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: it rotates row 2i with 2i+1, Hugging Face i with i+d/2."""
    rows, cols = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def _config(fields: _Fields, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_act": "silu",
        # GGUF keeps a float32; the shortest decimal is what the original config said.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def _tokenizer(fields: _Fields) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: _Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
