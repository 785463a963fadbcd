"""The shipped tiny model: its files are small, agree with each other, and its tokenizer loses nothing."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import blink_ref.model

FOLDER = Path(blink_ref.model.__file__).parent / "tiny"
SPECIAL_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def read_json(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, dict]:
    """The safetensors header: name to dtype, shape and data_offsets."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    return header


TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def round_trip(text: str) -> str:
    return TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False)


def test_all_files_together_take_at_most_four_megabytes():
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.is_file()) <= 4_000_000


def test_the_model_has_between_one_and_two_million_parameters(tensors):
    assert 1_000_000 <= sum(math.prod(tensor["shape"]) for tensor in tensors.values()) <= 2_000_000


def test_the_tensors_and_shapes_are_those_that_the_configuration_asks_for(tensors):
    config = read_json("config.json")
    D, F = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": [D],
        "self_attn.q_proj": [q_rows, D],
        "self_attn.k_proj": [kv_rows, D],
        "self_attn.v_proj": [kv_rows, D],
        "self_attn.o_proj": [D, q_rows],
        "post_attention_layernorm": [D],
        "mlp.gate_proj": [F, D],
        "mlp.up_proj": [F, D],
        "mlp.down_proj": [D, F],
    }
    expected = {"model.embed_tokens.weight": [config["vocab_size"], D], "model.norm.weight": [D]}
    for index in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    assert config["tie_word_embeddings"]
    assert {name: tensor["shape"] for name, tensor in tensors.items()} == expected


def test_the_weights_are_bfloat16_and_start_at_a_multiple_of_64_bytes(tensors):
    data = (FOLDER / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 64 == 0
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert start + max(tensor["data_offsets"][1] for tensor in tensors.values()) == len(data)


@given(st.text())
def test_any_text_comes_back_unchanged(text):
    assert round_trip(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "  two spaces, a tab\tand\r\nlines\n\n\n",
        "naïve café, £20,000 — “quoted”",
        "👩🏽‍🚀🇬🇧 e\u0301 نص 漢字 \x00\x7f\u200b\ufeff",
        "<|im_start|>user\nHello!<|im_end|>\n<|endoftext|>",
    ],
)
def test_awkward_text_comes_back_unchanged(text):
    assert round_trip(text) == text


def test_every_special_token_is_one_id():
    assert {text: TOKENIZER.encode(text).ids for text in SPECIAL_TOKENS} == {
        text: [token] for text, token in SPECIAL_TOKENS.items()
    }


def test_every_token_has_a_row_in_the_embedding_table():
    assert TOKENIZER.get_vocab_size() == read_json("config.json")["vocab_size"]


def test_the_configurations_name_the_same_end_tokens():
    tokenizer_config, generation = read_json("tokenizer_config.json"), read_json("generation_config.json")
    assert SPECIAL_TOKENS[tokenizer_config["eos_token"]] == read_json("config.json")["eos_token_id"]
    assert generation["eos_token_id"] == [SPECIAL_TOKENS["<|endoftext|>"], SPECIAL_TOKENS["<|im_end|>"]]
