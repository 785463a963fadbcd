"""Weights: mapped or copied, whole or refused; and the 16-bit floats."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.tensorfile import to_float32
from blink_ref.model.weights import Weights, from_bf16, layer_shapes, save_safetensors, to_bf16

CONFIG = ModelConfig(
    name="small",
    vocab=50,
    hidden=24,
    ffn=40,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=6,
    context=64,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied=False,
    bos_id=None,
    eos_ids=(),
    dtype="bfloat16",
)
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def tensors():
    return Weights.random(CONFIG).named(CONFIG)


def is_mapped(weights):
    return "mmap" in repr(root(weights.flat))


def root(array):
    """What owns the memory of ``array``, below all views."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return getattr(array, "obj", array)


def assert_same_values(weights, tensors):
    """Every matrix and norm of ``weights`` equals the tensor of its name."""
    for name, array in weights.named(CONFIG).items():
        np.testing.assert_array_equal(to_float32(array), to_float32(tensors[name]), err_msg=name)


def assert_aligned(weights):
    assert weights.flat.ctypes.data % 16 == 0
    offsets = [*weights.matrix.ravel(), weights.embed, weights.head]
    assert all(offset % 8 == 0 for offset in offsets)


def test_a_file_written_by_save_safetensors_is_mapped_without_a_copy(tmp_path, tensors):
    save_safetensors(tmp_path / "model.safetensors", tensors)
    weights = Weights.load(tmp_path, CONFIG)
    assert is_mapped(weights)
    assert weights.flat.dtype == np.uint16
    assert weights.norm.dtype == np.float32
    assert weights.matrix.shape == (2, 7)
    assert_aligned(weights)
    assert_same_values(weights, tensors)


def test_mapped_weights_have_the_type_of_allocated_ones(tmp_path, tensors):
    save_safetensors(tmp_path / "model.safetensors", tensors)
    mapped, made = Weights.load(tmp_path, CONFIG).flat, Weights.random(CONFIG).flat
    assert (mapped.dtype, mapped.flags.writeable) == (made.dtype, made.flags.writeable)
    assert type(mapped) is type(made) is np.ndarray


def test_writing_to_mapped_weights_leaves_the_file_alone(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    save_safetensors(file, tensors)
    before = file.read_bytes()
    Weights.load(tmp_path, CONFIG).flat[:] = 0
    assert file.read_bytes() == before


@pytest.mark.parametrize("pad", range(8))
def test_misaligned_data_is_copied_into_aligned_memory(tmp_path, tensors, pad):
    file = tmp_path / "model.safetensors"
    save_safetensors(file, tensors)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip() + b" " * pad
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    weights = Weights.load(tmp_path, CONFIG)
    assert is_mapped(weights) == ((8 + len(header)) % 16 == 0)
    assert_aligned(weights)
    assert_same_values(weights, tensors)


@pytest.mark.parametrize(("dtype", "held"), [("float16", np.int16), ("float32", np.float32)])
def test_other_dtypes_are_kept_as_stored(tmp_path, dtype, held):
    made = Weights.random(CONFIG, dtype=dtype)
    save_safetensors(tmp_path / "model.safetensors", made.named(CONFIG))
    weights = Weights.load(tmp_path, CONFIG)
    assert weights.flat.dtype == held
    assert is_mapped(weights)
    assert_same_values(weights, made.named(CONFIG))


def test_a_file_of_the_safetensors_package_loads_and_ours_loads_there(tmp_path):
    tensors = Weights.random(CONFIG, dtype="float32").named(CONFIG)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_values(Weights.load(tmp_path, CONFIG), tensors)
    save_safetensors(tmp_path / "ours.safetensors", tensors)
    theirs = load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == tensors.keys()
    assert all((theirs[name] == tensors[name]).all() for name in tensors)


def test_shards_are_joined_by_their_index(tmp_path, tensors):
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for shard, listed in shards.items():
        save_safetensors(tmp_path / shard, {name: tensors[name] for name in listed})
    weight_map = {name: shard for shard, listed in shards.items() for name in listed}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    weights = Weights.load(tmp_path, CONFIG)
    assert_aligned(weights)
    assert_same_values(weights, tensors)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(BlinkError, match=r"b\.safetensors is missing"):
        Weights.load(tmp_path, CONFIG)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../a.safetensors")}))
    with pytest.raises(BlinkError, match="a file beside it"):
        Weights.load(tmp_path, CONFIG)


def test_mixed_dtypes_are_rounded_to_the_declared_one(tmp_path, tensors):
    mixed = tensors | {Q_PROJ: to_float32(tensors[Q_PROJ]) + np.float32(1e-6)}
    save_safetensors(tmp_path / "model.safetensors", mixed)
    weights = Weights.load(tmp_path, CONFIG)
    assert weights.flat.dtype == np.uint16
    assert_same_values(weights, mixed | {Q_PROJ: to_bf16(mixed[Q_PROJ])})


def test_a_file_of_float64_is_rounded_and_norms_may_be_of_any_dtype(tmp_path, tensors):
    wide = {name: to_float32(array).astype(np.float64) for name, array in tensors.items()}
    save_file(wide, tmp_path / "model.safetensors")
    assert_same_values(Weights.load(tmp_path, CONFIG), tensors)
    norms = {name: to_bf16(tensors[name]) for name in tensors if "norm" in name}
    save_safetensors(tmp_path / "model.safetensors", tensors | norms)
    assert_same_values(Weights.load(tmp_path, CONFIG), tensors | norms)


def test_a_tied_head_is_the_embedding(tmp_path, tensors):
    tied = replace(CONFIG, tied=True)
    del tensors["lm_head.weight"]
    save_safetensors(tmp_path / "model.safetensors", tensors)
    weights = Weights.load(tmp_path, tied)
    assert weights.head == weights.embed
    with pytest.raises(BlinkError, match=r"tensor lm_head\.weight is missing"):
        Weights.load(tmp_path, CONFIG)


def test_dense_gives_float32_of_the_shapes_listed(tmp_path, tensors):
    save_safetensors(tmp_path / "model.safetensors", tensors)
    weights = Weights.load(tmp_path, CONFIG)
    query = weights.dense(weights.matrix[1, 0], *layer_shapes(CONFIG)[0])
    assert query.dtype == np.float32
    np.testing.assert_array_equal(query, to_float32(tensors[Q_PROJ]))


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, tensors, cut):
    file = tmp_path / "model.safetensors"
    save_safetensors(file, tensors)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(BlinkError, match=r"model\.safetensors (is truncated or corrupt|cannot be mapped)"):
        Weights.load(tmp_path, CONFIG)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    ],
)
def test_a_corrupt_header_is_refused(tmp_path, header):
    raw = len(header).to_bytes(8, "little") + header + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(BlinkError, match="header is corrupt"):
        Weights.load(tmp_path, CONFIG)


def test_an_empty_directory_says_what_is_looked_for(tmp_path):
    with pytest.raises(BlinkError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Weights.load(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (None, f"tensor {Q_PROJ} is missing"),
        (np.zeros((24, 25), np.float32), rf"tensor {Q_PROJ} has shape \(24, 25\)"),
        (np.zeros((24, 24), np.int8), f"tensor {Q_PROJ} is stored as I8"),
    ],
)
def test_a_tensor_that_cannot_be_served_is_named(tmp_path, wrong, complaint):
    tensors = Weights.random(CONFIG, dtype="float32").named(CONFIG)
    changed = tensors | {Q_PROJ: wrong}
    save_file(
        {name: array for name, array in changed.items() if array is not None}, tmp_path / "model.safetensors"
    )
    with pytest.raises(BlinkError, match=complaint):
        Weights.load(tmp_path, CONFIG)


def test_random_weights_depend_on_the_seed_alone():
    one, same, other = Weights.random(CONFIG, 1), Weights.random(CONFIG, 1), Weights.random(CONFIG, 2)
    np.testing.assert_array_equal(one.flat, same.flat)
    assert (one.flat != other.flat).mean() > 0.9
    assert_aligned(one)
    embed = one.dense(one.embed, CONFIG.vocab, CONFIG.hidden)
    assert 0.018 < embed.std() < 0.022


def test_bf16_rounds_to_nearest_with_ties_to_even():
    # bfloat16 has 8 significant bits: its neighbours of 1 are 1 - 2**-8 and 1 + 2**-7.
    values = [1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, 3.3961e38, 1e-45, 0.0, -0.0]
    expected = [1, 1, 1 + 2**-6, 1 + 2**-7, -1, np.inf, np.inf, 0.0, 0.0, -0.0]
    expected[6] = 255 * 2.0**120
    rounded = from_bf16(to_bf16(np.array(values, np.float32)))
    np.testing.assert_array_equal(rounded, np.array(expected, np.float32))
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(expected))


def test_bf16_keeps_nan_and_infinity():
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    rounded = from_bf16(to_bf16(bits.view(np.float32)))
    np.testing.assert_array_equal(rounded[:2], [np.inf, -np.inf])
    assert np.isnan(rounded[2:]).all()


def test_every_bf16_survives_the_way_to_float32_and_back():
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    numbers = ~np.isnan(from_bf16(bits))
    np.testing.assert_array_equal(to_bf16(from_bf16(bits))[numbers], bits[numbers])
