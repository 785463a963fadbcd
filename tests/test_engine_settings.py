"""The sizes an engine chooses, and what it refuses."""

import pytest

from blink_ref.engine import settings
from blink_ref.errors import BlinkError
from blink_ref.kernels import tiles
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve


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


def test_the_arena_holds_a_row_of_the_widest_activations(config):
    assert settings.choose(config, "cpu").shared > max(config.hidden, config.ffn)
