"""The picture: well-formed, complete, and not too large."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from trace_history import History, rich_history

from blink_ref.trace.frame import LEFT, MOST_SLOTS
from blink_ref.trace.gantt import COLOURS
from blink_ref.trace.page_map import CACHED_COLOUR
from blink_ref.trace.picture import picture
from blink_ref.trace.record import Part, Recording
from blink_ref.trace.slots import DECODE, PREFILL, STATES
from blink_ref.trace.svg import runs
from blink_ref.trace.timeline import timeline

SVG = "{http://www.w3.org/2000/svg}"


def draw(recording, title="tiny on cpu"):
    """The picture's root, and its text."""
    text = picture(timeline(recording), title)
    root = ET.fromstring(text)
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.iter(f"{SVG}rect"):
        if shape.get("x"):
            assert 0 <= float(shape.get("x")) <= float(shape.get("x")) + float(shape.get("width")) <= width + 1
            assert 0 <= float(shape.get("y")) <= float(shape.get("y")) + float(shape.get("height")) <= height
    return root, text


def tips(root):
    return {title.text for title in root.iter(f"{SVG}title")}


def words(root):
    return {text.text for text in root.iter(f"{SVG}text")}


def fills(root):
    return {shape.get("fill") for shape in root.iter(f"{SVG}rect")}


def test_every_state_slot_and_page_is_in_it_with_legend_title_and_units():
    root, _ = draw(rich_history().recording(), "a <model> & more")
    said = words(root)
    assert {"a <model> & more", "step", "ms", "page 0", *(f"slot {slot}" for slot in range(13))} <= said
    assert any(text.startswith("13 requests in 13 slots; ") for text in said)
    assert {*COLOURS.values(), CACHED_COLOUR, "url(#shared)"} <= fills(root)
    hints = tips(root)
    for state in STATES:
        assert any(f": {state}, step" in hint for hint in hints if hint), state
    assert "slot 2: 96 positions found in the cache" in hints
    assert "slot 0: length" in hints
    assert "a step gives way after 3 layers" in hints
    assert any("and others" in hint for hint in hints if hint)
    assert any("cached" in hint for hint in hints if hint)


def test_a_span_is_as_wide_as_it_has_steps():
    history = History()
    history.arrive(0, prompt=8, answer=10)
    history.run(12)
    root, _ = draw(history.recording())
    shapes = {
        shape.get("fill"): shape for shape in root.iter(f"{SVG}rect") if shape.find(f"{SVG}title") is not None
    }
    prefill, decode = shapes[COLOURS[PREFILL]], shapes[COLOURS[DECODE]]
    assert float(prefill.get("x")) == LEFT
    assert float(decode.get("width")) == pytest.approx(9 * float(prefill.get("width")), rel=1e-3)
    assert "8" in words(root)


def long_history(slots, rounds):
    history = History(pages=512, running=slots)
    for n in range(rounds):
        for slot in range(slots):
            if not any(request.slot == slot for request in history.running + history.waiting):
                history.arrive(slot, 30 + n % 50, 20 + (n + slot) % 60, shared=6 * (slot % 4 == 0 and n > 4))
        history.run(8)
    history.run(100)
    return history


def test_thousands_of_steps_share_columns_and_the_file_stays_small():
    history = long_history(24, 300)
    root, text = draw(history.recording())
    assert history.step_number > 2000
    assert len(text) < 3_000_000
    assert any("steps share a column" in said for said in words(root))


def test_of_many_slots_the_first_are_drawn_and_the_others_counted():
    history = History(pages=512, running=200)
    for slot in range(100):
        history.arrive(slot, 8, 3)
    history.run(40)
    root, _ = draw(history.recording())
    assert f"the first {MOST_SLOTS} slots; {100 - MOST_SLOTS} more are not drawn" in words(root)


def test_of_many_pages_every_second_is_drawn():
    history = History(pages=512)
    for slot in range(8):
        history.arrive(slot, 900, 3)
    history.run(300)
    root, _ = draw(history.recording())
    assert any("(one page in 2 is drawn)" in said for said in words(root))


def test_lost_events_are_a_line_and_a_number():
    history, nothing = rich_history(), np.full(96, -1)
    parts = [Part(nothing, [history.words()[:600]]), Part(nothing, [history.words()[700:]])]
    root, _ = draw(Recording(parts, 100))
    assert any("100 events were lost" in said for said in words(root))
    assert [path for path in root.iter(f"{SVG}path") if path.get("stroke") == "#d6453d"]


def test_without_a_step_there_is_nothing_to_draw():
    with pytest.raises(ValueError, match="no step"):
        picture(timeline(rich_history().recording(0, 3)), "x")


@given(
    arrays.arrays(np.int8, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.integers(-1, 2)),
    st.booleans(),
)
def test_runs_cover_a_panel_once_with_its_values(panel, tall):
    again = np.full(panel.shape, 99)
    for value, line, lines, column, columns in runs(panel, tall):
        here = again[line : line + lines, column : column + columns]
        assert (here == 99).all()
        here[:] = value
        assert tall or lines == 1
    assert (again == panel).all()
