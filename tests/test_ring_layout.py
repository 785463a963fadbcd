"""The window's layout: sizes, alignment, and one writer for every word."""

import dataclasses

import numpy as np
import pytest
from engine_bench import SMALL
from hypothesis import given
from hypothesis import strategies as st

from blink_ref.engine import memory, settings
from blink_ref.ring import layout as layout_module
from blink_ref.ring.layout import (
    END,
    EVENTS,
    HEADER,
    LINE,
    MOST_LOGPROBS,
    PAGE,
    REASONS,
    REQUEST,
    TOKEN,
    Layout,
    pack_record,
    unpack_record,
)

LAYOUTS = [Layout(), Layout(slots=1, arena=1, outbox=2), Layout(slots=64, workers=4, arena=100, outbox=16)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["default", "least", "four workers"])


def fields(half):
    """(offset, dtype) of each field, in order."""
    return [(offset, dtype) for dtype, offset, *_ in half.fields.values()]


@layouts
def test_the_halves_are_whole_pages_so_that_each_can_be_registered_alone(layout):
    assert layout.nic_half.itemsize % PAGE == 0
    assert layout.gpu_half.itemsize % PAGE == 0
    assert layout.size == layout.nic_half.itemsize + layout.gpu_half.itemsize


@layouts
def test_every_field_starts_on_a_cache_line_of_its_own(layout):
    for half in (layout.nic_half, layout.gpu_half):
        end = 0
        for offset, dtype in fields(half):
            assert offset % LINE == 0
            assert offset >= end
            end = offset + dtype.itemsize
        assert end <= half.itemsize


def test_a_field_is_written_by_one_side():
    nic, gpu = Layout().nic_half.names, Layout().gpu_half.names
    assert nic == (
        "header",
        "stop",
        "doorbell",
        "cancel",
        "consumed",
        "urgent",
        "trace",
        "request",
        "arena",
    )
    assert gpu == (
        "heartbeat",
        "state",
        "outbox",
        "logprob",
        "likely",
        "position",
        "owner",
        "history",
        "event",
    )


@layouts
def test_the_words_of_two_workers_never_share_a_cache_line(layout):
    for name in ("consumed", "urgent"):
        assert layout.nic_half.fields[name][0].itemsize == layout.workers * LINE


def test_header_and_request_fill_whole_cache_lines_and_their_words_are_aligned():
    assert HEADER.itemsize == LINE
    assert REQUEST.itemsize == 2 * LINE
    assert REQUEST.isalignedstruct, "else compiled code reads each byte of it by itself"
    for record in (HEADER, REQUEST):
        for dtype, offset, *_ in record.fields.values():
            assert offset % dtype.base.itemsize == 0


@layouts
def test_a_row_of_log_probabilities_lies_beside_each_outbox_record(layout):
    half = np.zeros((), layout.gpu_half)
    records = layout.workers * layout.outbox
    assert half["logprob"].shape == (records, 1 + MOST_LOGPROBS)
    assert half["likely"].shape == (records, MOST_LOGPROBS)
    assert half["logprob"].flags.c_contiguous


def test_the_words_of_the_heartbeat_are_different_and_fit():
    words = [value for name, value in vars(layout_module).items() if name.startswith("BEAT")]
    assert sorted(words) == list(range(len(words)))
    assert Layout().gpu_half.fields["heartbeat"][0].shape[0] >= len(words)


def test_events_have_different_kinds_and_each_a_name():
    kinds = [value for name, value in vars(layout_module).items() if name.startswith("EVENT_")]
    assert sorted(kinds) == sorted(EVENTS)
    assert len(set(EVENTS.values())) == len(kinds)


@layouts
def test_an_array_of_words_lies_in_the_half_without_gaps(layout):
    half = np.zeros((), layout.nic_half)
    half["arena"][-1] = 7
    assert half["arena"].flags.c_contiguous
    assert half["arena"].shape == (layout.workers * layout.arena + layout.rehearsal,)
    assert half["doorbell"].strides == (4,)
    assert not half["request"]["prompt_len"].any()


@pytest.mark.parametrize("context", [256, 2048, 8192, 131072])
def test_the_default_window_stays_under_32_mb_at_any_context(context):
    config = dataclasses.replace(SMALL, context=context, vocab=128256)
    layout = memory.window_layout(config, settings.choose(config, "cpu"))
    assert layout.slots == 4096
    assert layout.size < 32e6


def test_the_arena_of_a_default_window_holds_the_longest_prompts():
    config = dataclasses.replace(SMALL, context=8192)
    chosen = settings.choose(config, "cpu")
    assert memory.window_layout(config, chosen).arena >= chosen.running * chosen.context


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"slots": 0}, "slots is a power of two from 1 on, not 0"),
        ({"slots": 48}, "slots is a power of two from 1 on, not 48"),
        ({"outbox": 100}, "outbox is a power of two from 2 on, not 100"),
        ({"events": 100}, "events is a power of two from 1 on, not 100"),
        ({"events": 0}, "events is a power of two from 1 on, not 0"),
        ({"outbox": 1}, "outbox is a power of two from 2 on, not 1"),
        ({"slots": 64, "workers": 3}, "3 workers cannot share 64 slots evenly"),
    ],
)
def test_sizes_that_the_kernel_cannot_mask_are_refused(sizes, complaint):
    with pytest.raises(ValueError, match=complaint):
        Layout(**sizes)


bits = st.integers(1, 13)
records = st.tuples(st.integers(0, 2**16 - 1), st.sampled_from([TOKEN, END]), st.integers(0, 2**24 - 1))


@given(st.integers(0, 2**40), bits, records)
def test_a_record_comes_back_as_it_was_packed(index, bits, record):
    word = pack_record(index, 1 << bits, *record)
    assert 0 <= word < 2**64
    assert unpack_record(word, index, 1 << bits) == record


@given(st.integers(0, 2**40), bits, records, st.integers(1, 2**16 - 1))
def test_a_record_of_another_lap_counts_as_not_yet_written(index, bits, record, laps):
    outbox = 1 << bits
    word = pack_record(index, outbox, *record)
    assert unpack_record(word, index + laps * outbox, outbox) is None


@given(bits)
def test_zeros_are_no_record_of_the_first_lap(bits):
    assert unpack_record(0, 0, 1 << bits) is None
    assert unpack_record(0, (1 << bits) - 1, 1 << bits) is None


def test_every_reason_has_words():
    assert sorted(REASONS) == list(range(1, 9))
    assert all(REASONS.values())
