"""The sizes an engine chooses, and what it refuses."""

from dataclasses import replace

import pytest

from blink_ref import cli
from blink_ref.engine import __main__ as engine_command
from blink_ref.engine import settings
from blink_ref.errors import BlinkError
from blink_ref.kernels import tiles
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import TINY, resolve
from blink_ref.nic import engine_process as process


@pytest.fixture(scope="module")
def config():
    return ModelConfig.load(resolve("tiny"))


@pytest.mark.parametrize("target", ["cpu", "python"])
def test_a_number_of_blocks_that_is_asked_for_is_taken(config, target):
    assert settings.choose(config, target, sms=3).blocks == 3


@pytest.mark.parametrize("target", ["cpu", "python"])
@pytest.mark.parametrize(
    ("sms", "complaint"), [(5000, "--sms is 5000; at most"), (-1, "--sms is -1; give the number")]
)
def test_a_number_of_blocks_out_of_reason_is_refused(config, target, sms, complaint):
    with pytest.raises(BlinkError, match=complaint):
        settings.choose(config, target, sms=sms)


@pytest.mark.parametrize(("sms", "own"), [(0, True), (32, True), (31, False), (1, False)])
def test_a_gpu_with_many_sms_spares_one_for_the_scheduler(config, monkeypatch, sms, own):
    on_cuda = pytest.importorskip("blink_ref.simt.on_cuda", reason="numba-cuda: pip install 'blink-ref[cuda13]'")
    monkeypatch.setattr(on_cuda, "limits", lambda: on_cuda.Limits("a GPU", 132, 232_448, 80 << 30))
    assert settings.choose(config, "cuda", sms).scheduler_block == own
    assert not settings.choose(config, "cuda", sms, scheduler_block=False).scheduler_block
    assert not settings.choose(config, "cpu").scheduler_block


def test_on_a_gpu_steps_of_many_rows_are_computed_in_tiles_unless_tokens_must_not_depend_on_the_batch(
    config, monkeypatch
):
    on_cuda = pytest.importorskip("blink_ref.simt.on_cuda", reason="numba-cuda: pip install 'blink-ref[cuda13]'")
    monkeypatch.setattr(on_cuda, "limits", lambda: on_cuda.Limits("a GPU", 132, 232_448, 80 << 30))
    assert settings.choose(config, "cuda").tiles == tiles.FEW
    assert settings.choose(config, "cuda", batch_invariant=True).tiles == 0
    assert settings.choose(config, "cpu").tiles == settings.choose(config, "python").tiles == 0


def test_the_cache_holds_one_request_of_full_length_however_little_memory_is_allowed(config):
    chosen = settings.choose(config, "cpu", cache_bytes=1)
    assert chosen.pages * chosen.page_size >= chosen.context


@pytest.mark.parametrize("target", ["cpu", "python"])
def test_keys_and_values_are_float32_or_bfloat16_which_takes_half_the_room(config, target):
    given = {"cache_bytes": 1 << 24}
    wide, narrow = (settings.choose(config, target, **given, kv_dtype=each) for each in ("float32", "bfloat16"))
    assert (wide.kv_dtype, wide.kv_bytes) == ("float32", 4)
    assert (narrow.kv_dtype, narrow.kv_bytes) == ("bfloat16", 2)
    assert narrow.pages // 2 == wide.pages
    assert settings.choose(config, target).kv_dtype == settings.KV_DTYPE[target]


def test_a_type_that_keys_and_values_cannot_have_is_refused(config):
    complaint = "--kv-dtype is 'float16'; keys and values are stored as float32 or bfloat16"
    with pytest.raises(BlinkError, match=complaint):
        settings.choose(config, "cpu", kv_dtype="float16")
    with pytest.raises(BlinkError, match=complaint):
        replace(settings.choose(config, "cpu"), kv_dtype="float16")


class Asked(Exception):
    """In the place of an engine's process."""


def test_what_starts_an_engine_says_how_keys_and_values_are_stored(monkeypatch):
    def spawn(options):
        raise Asked(options)

    monkeypatch.setattr(process, "_spawn", spawn)
    for wanted in (None, "float32", "bfloat16"):
        with pytest.raises(Asked) as asked, process.engine_process(TINY, "cpu", kv_dtype=wanted):
            pass
        assert engine_command._parser().parse_args(asked.value.args[0]).kv_dtype == wanted
        arguments = ["generate", *([] if wanted is None else ["--kv-dtype", wanted]), "text"]
        assert cli._parser().parse_args(arguments).kv_dtype == wanted


def test_the_arena_holds_a_row_of_the_widest_activations(config):
    assert settings.choose(config, "cpu").shared > max(config.hidden, config.ffn)
