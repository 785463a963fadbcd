"""The sizes an engine chooses, and what it refuses."""

import pytest

from blink_ref.engine import settings
from blink_ref.errors import BlinkError
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


def test_the_cache_holds_one_request_of_full_length_however_little_memory_is_allowed(config):
    chosen = settings.choose(config, "cpu", cache_bytes=1)
    assert chosen.pages * chosen.page_size >= chosen.context


def test_the_arena_holds_a_row_of_the_widest_activations(config):
    assert settings.choose(config, "cpu").shared > max(config.hidden, config.ffn)
