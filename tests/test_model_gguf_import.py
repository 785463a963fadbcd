"""A small GGUF file, written as llama.cpp does, comes out as the model it was made of."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from tokenizers import pre_tokenizers

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.gguf_import import IN_LAYER, TOP, convert
from blink_ref.model.tensorfile import to_float32
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.model.weights import Weights, to_bf16

Q8_0 = GGMLQuantizationType.Q8_0
TOKENS = ["<|end|>", "<|start|>", "<|stop|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
CONFIG = ModelConfig(
    name="small",
    vocab=len(TOKENS),
    hidden=64,
    ffn=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context=128,
    rms_eps=1e-5,
    rope_theta=50000.0,
    rope_scaling=None,
    tied=True,
    bos_id=1,
    eos_ids=(2,),
    dtype="bfloat16",
)


def interleave(matrix, heads):
    """What llama.cpp's converter does to q and k: rows i and i + d/2 of a head become 2i and 2i + 1."""
    rows, cols = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def write_gguf(file, pre="smollm", extra=None, left_out=""):
    """Write CONFIG's model with random weights, the MLP as Q8_0; return what its tensors stand for."""
    tensors = Weights.random(CONFIG, dtype="float32").named(CONFIG)
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(CONFIG.context)
    writer.add_embedding_length(CONFIG.hidden)
    writer.add_block_count(CONFIG.layers)
    writer.add_feed_forward_length(CONFIG.ffn)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(CONFIG.kv_heads)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.rms_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if left_out != "tokenizer.ggml.padding_token_id":
        writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}")
    names = {ours: theirs for theirs, ours in TOP.items()}
    for layer in range(CONFIG.layers):
        for theirs, ours in IN_LAYER.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, array in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, CONFIG.heads if "q_proj" in name else CONFIG.kv_heads)
        if "mlp" in name:
            quantised = quantize(array, Q8_0)
            tensors[name] = dequantize(quantised, Q8_0)
            writer.add_tensor(names[name], quantised, raw_dtype=Q8_0)
        else:
            writer.add_tensor(names[name], array)
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def converted(tmp_path):
    tensors = write_gguf(tmp_path / "small.gguf")
    target = tmp_path / "small"
    target.mkdir()
    seen = []
    convert(tmp_path / "small.gguf", target, lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]
    return target, tensors


def test_config_and_weights_survive_the_conversion(converted):
    target, tensors = converted
    assert ModelConfig.load(target) == CONFIG
    weights = Weights.load(target, CONFIG).named(CONFIG)
    for name, array in weights.items():
        np.testing.assert_array_equal(to_float32(array), to_float32(to_bf16(tensors[name])), err_msg=name)


def test_the_tokenizer_merges_splits_digits_and_knows_control_tokens(converted):
    tokenizer = Tokenizer.load(converted[0])
    letter = {token: i for i, token in enumerate(TOKENS)}
    assert tokenizer.encode("ab1") == [letter["ab"], letter["1"]]
    assert tokenizer.encode("<|stop|>", allow_special=True) == [2]
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pre": "qwen2"}, r"is of kind \('llama', 'gpt2', 'qwen2'\)"),
        ({"extra": "blk.0.attn_q.bias"}, r"tensor blk\.0\.attn_q\.bias of the GGUF file is unknown"),
        ({"left_out": "tokenizer.ggml.padding_token_id"}, r"lacks tokenizer\.ggml\.padding_token_id"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, changes, complaint):
    write_gguf(tmp_path / "small.gguf", **changes)
    with pytest.raises(BlinkError, match=complaint):
        convert(tmp_path / "small.gguf", tmp_path, lambda done, total: None)
