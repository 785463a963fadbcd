"""What ``config.json`` may say, what is refused, and the RoPE table."""

import json

import numpy as np
import pytest

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig, rope_table

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Inverse frequencies of Llama-3.2-1B as transformers 5.24 computes them (float32).
LLAMA3_FREQUENCIES = """
1 0.66360128 0.44036663 0.29222783 0.19392276 0.12868738 0.085397102 0.056669619 0.037606031 0.024955409
0.016560441 0.010989529 0.0072926651 0.0048394212 0.0032114461 0.001290548 0.00042955671 9.7082862e-05
1.9461639e-05 1.2914767e-05 8.5702559e-06 5.6872323e-06 3.7740544e-06 2.5044671e-06 1.6619674e-06
1.1028836e-06 7.3187493e-07 4.8567313e-07 3.2229329e-07 2.1387423e-07 1.419272e-07 9.4183065e-08
"""


def load(folder, generation=None, **changes):
    raw = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(folder)


def frequencies(config):
    table = rope_table(config, 2)
    half = config.head_dim // 2
    return np.arctan2(table[1, half:], table[1, :half])


def test_a_llama_config_is_read(tmp_path):
    config = load(tmp_path)
    assert config == ModelConfig(
        name=tmp_path.name,
        vocab=1000,
        hidden=64,
        ffn=160,
        layers=3,
        heads=8,
        kv_heads=2,
        head_dim=8,
        context=512,
        rms_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=True,
        bos_id=1,
        eos_ids=(2,),
        dtype="bfloat16",
    )


@pytest.mark.parametrize(("tied", "embeddings"), [(True, 1), (False, 2)])
def test_parameters_are_counted_with_a_tied_embedding_once(tmp_path, tied, embeddings):
    layer = 64 * 64 * 2 + 16 * 64 * 2 + 3 * 160 * 64 + 2 * 64
    assert load(tmp_path, tie_word_embeddings=tied).parameters == 1000 * 64 * embeddings + 3 * layer + 64


def test_what_a_config_leaves_out_has_transformers_defaults(tmp_path):
    names = "num_key_value_heads max_position_embeddings rms_norm_eps rope_theta tie_word_embeddings torch_dtype"
    config = load(tmp_path, **dict.fromkeys(names.split(), "absent"))
    assert (config.kv_heads, config.context, config.rms_eps, config.rope_theta) == (8, 2048, 1e-6, 10000.0)
    assert (config.tied, config.dtype) == (False, "float32")


def test_head_dim_need_not_be_hidden_over_heads(tmp_path):
    assert load(tmp_path, head_dim=32).head_dim == 32


def test_the_generation_config_decides_what_ends_a_text(tmp_path):
    assert load(tmp_path, generation={"eos_token_id": [2, 7]}).eos_ids == (2, 7)
    assert load(tmp_path, generation={"temperature": 0.6}, eos_token_id=[3, 4]).eos_ids == (3, 4)
    assert load(tmp_path, generation={}, eos_token_id=None, bos_token_id=None).eos_ids == ()


def test_a_model_in_the_hub_cache_has_its_hub_name(tmp_path):
    folder = tmp_path / "models--some-org--Some-Model" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    assert load(folder).name == "some-org/Some-Model"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture .*GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "mamba"}, "architecture 'mamba'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 must be above"),
        ({"rope_scaling": 4}, "rope scaling is 4"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is no multiple"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"eos_token_id": 1000}, "special token 1000 is outside"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_in_one_line(tmp_path, changes, complaint):
    with pytest.raises(BlinkError, match=complaint) as refusal:
        load(tmp_path, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "\\ud8'])
def test_a_corrupt_config_names_its_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BlinkError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_config_says_what_a_model_directory_holds(tmp_path):
    with pytest.raises(BlinkError, match=r"config\.json is missing; .* tokenizer\.json"):
        ModelConfig.load(tmp_path)


def test_rope_angles_are_position_times_inverse_frequency(tmp_path):
    table = rope_table(load(tmp_path), 512)
    angle = 511 * 10000.0 ** (-np.arange(4) / 4)
    assert table.shape == (512, 8)
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table[511], np.concatenate([np.cos(angle), np.sin(angle)]).astype(np.float32))


def test_linear_scaling_divides_every_frequency(tmp_path):
    config = load(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    np.testing.assert_allclose(frequencies(config), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


@pytest.mark.parametrize("style", ["old", "new"])
def test_llama3_scaling_gives_the_frequencies_of_transformers(tmp_path, style):
    shape = {"hidden_size": 2048, "num_attention_heads": 32, "max_position_embeddings": 131072}
    if style == "old":
        config = load(tmp_path, **shape, rope_theta=500000.0, rope_scaling=LLAMA3_SCALING)
    else:
        rope = LLAMA3_SCALING | {"rope_theta": 500000.0}
        config = load(tmp_path, **shape, rope_theta="absent", rope_parameters=rope)
    # The expected values are float32 throughout: a few roundings of 2**-24 each.
    np.testing.assert_allclose(frequencies(config), np.fromstring(LLAMA3_FREQUENCIES, sep=" "), rtol=2e-6)
