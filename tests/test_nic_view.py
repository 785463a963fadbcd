"""The live view, drawn from a window that is filled by hand."""

import io

import numpy as np
import pytest
from rich.console import Console

from blink_ref.nic.sight import IN_CACHE, NO_SLOT, look
from blink_ref.nic.view import BATCH_LINES, COLUMNS, EIGHTHS, HEIGHT, view
from blink_ref.nic.watch import tail
from blink_ref.ring.layout import CACHED, DECODE, DONE, HISTORY, PHASES, PREFILL, STEP_WORDS, Layout
from blink_ref.ring.window import Window


@pytest.fixture
def window(tmp_path):
    made = Window.create(Layout(slots=128, arena=16, outbox=2, pages=200, page_size=4), directory=tmp_path)
    yield made
    made.unlink()
    made.close()


def own(window, slot, pages, position):
    """Give a slot pages, in this order, and positions in the cache."""
    for place, page in enumerate(pages):
        window.gpu["owner"][page] = slot << 16 | place + 1
    window.gpu["position"][slot] = position


def step(window, number, decode=1, prefill=0, samples=1, ns=8_000_000, phases=(1, 1, 1, 1, 1, 1, 1, 1)):
    """Write the record of a step."""
    record = window.gpu["history"].reshape(HISTORY, STEP_WORDS)[number % HISTORY]
    record[: 5 + len(PHASES)] = number, decode, prefill, samples, ns, *phases


def drawn(window):
    """The view's lines, without their frame."""
    console = Console(width=80, height=24, record=True, file=io.StringIO())
    console.print(view(look(window), "tiny on cpu"))
    return console.export_text().splitlines()


def row(lines, name, below=0):
    """COLUMNS cells beside a name, or so many lines below it."""
    at = next(n for n, line in enumerate(lines) if line.startswith(f"│ {name}")) + below
    return lines[at][9 : 9 + COLUMNS]


def test_an_engine_that_has_done_nothing_yet_can_be_drawn(window):
    lines = drawn(window)
    assert row(lines, "ring") == "·" * COLUMNS
    assert row(lines, "pages") == "·" * COLUMNS
    assert "no token yet" in lines[-1]


@pytest.mark.parametrize("steps", [0, 1, 300])
def test_the_view_takes_the_same_lines_of_80_columns_whatever_there_is(window, steps):
    own(window, 127, range(0, 200), 800)
    window.gpu["state"] = np.arange(128) % 8
    for number in range(1, steps + 1):
        step(window, number, decode=64, prefill=64, ns=2**32 - 1, phases=(2**32 - 1,) * len(PHASES))
    lines = drawn(window)
    assert len(lines) == HEIGHT
    assert {len(line) for line in lines} == {80}


def test_a_slots_letter_tells_its_state_and_the_line_below_counts_them(window):
    window.gpu["state"][[0, 2, 3]] = DECODE, PREFILL, DONE
    window.gpu["state"][100] = DECODE
    lines = drawn(window)
    assert row(lines, "ring").startswith("d·p✓··")
    assert row(lines, "ring", 1).startswith("of 128")
    for count in ("p 1 prefill", "d 2 decode", "✓ 1 ended"):
        assert count in row(lines, "ring", 1)


def test_a_page_shows_the_letter_of_its_slot(window):
    own(window, 0, [0, 1, 5], 0)
    own(window, 11, [2, 64], 0)
    lines = drawn(window)
    assert row(lines, "pages").startswith("00b··0··")
    assert row(lines, "pages", 1).startswith("b·")
    assert "0-127 of 200: 5 taken, 0 in use; ▒ 0 cached" in row(lines, "pages", 2)


def test_a_page_that_is_only_kept_has_a_mark_of_its_own_and_is_counted(window):
    own(window, 0, [0, 1], 0)
    window.gpu["owner"][[3, 70, 199]] = CACHED
    lines = drawn(window)
    assert row(lines, "pages").startswith("00·▒··")
    assert row(lines, "pages", 1).startswith("······▒·")
    assert "2 taken, 0 in use; ▒ 3 cached" in row(lines, "pages", 2)
    sight = look(window)
    assert np.flatnonzero(sight.page_slot == IN_CACHE).tolist() == [3, 70, 199]
    assert sight.page_slot[2] == NO_SLOT
    assert not sight.page_filled.any()


def test_a_page_of_several_slots_shows_the_one_that_owns_it_last(window):
    own(window, 1, [4, 5], 8)
    own(window, 2, [4, 6], 8)
    assert row(drawn(window), "pages").startswith("····212·")


def test_the_line_below_the_pages_has_room_for_the_largest_counts(tmp_path):
    made = Window.create(Layout(slots=4, arena=16, outbox=2, pages=100_000), directory=tmp_path)
    made.gpu["owner"][:] = CACHED
    made.gpu["owner"][:40_000] = 1
    made.gpu["position"][0] = 1
    assert "; ▒ 60000 cached" in row(drawn(made), "pages", 2)
    made.unlink()
    made.close()


def test_a_page_is_in_use_from_its_first_position_on(window):
    own(window, 3, [7, 2, 4], 5)
    sight = look(window)
    assert np.flatnonzero(sight.page_slot == 3).tolist() == [2, 4, 7]
    assert np.flatnonzero(sight.page_filled).tolist() == [2, 7]
    window.gpu["position"][3] = 4
    assert np.flatnonzero(look(window).page_filled).tolist() == [7]


def test_the_batch_has_a_column_a_step_as_high_as_its_rows(window):
    step(window, 1, decode=0, prefill=32, samples=0)
    step(window, 2, decode=16, prefill=0)
    step(window, 3, decode=1, prefill=0)
    lines = drawn(window)
    columns = ["".join(row(lines, "batch", n)[step] for n in range(BATCH_LINES)) for step in range(3)]
    assert columns == ["████", "  ██", "   ▁"]
    assert "1 decode" in row(lines, "batch", BATCH_LINES)
    assert "in step 3" in row(lines, "batch", BATCH_LINES)


def test_prefill_rows_stand_on_decode_rows(window):
    step(window, 1, decode=4, prefill=28)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view(look(window), ""))
    cells = [line for line in console.export_text(styles=True).splitlines() if EIGHTHS[4] in line]
    assert len(cells) == 1
    assert "\x1b[32;46m▄" in cells[0]


def test_more_steps_than_columns_show_the_last_ones(window):
    for number in range(1, 200):
        step(window, number, decode=8 if number <= 150 else 1)
    lines = drawn(window)
    assert row(lines, "batch", BATCH_LINES - 1) == "█" * (COLUMNS - 49) + "▄" * 49


def test_steps_come_in_order_and_half_written_ones_not_at_all(window):
    for number in range(100, 300):
        step(window, number)
    window.gpu["history"].reshape(HISTORY, STEP_WORDS)[0][0] = 77
    numbers = [step.number for step in look(window).steps]
    assert numbers == [n for n in range(300 - HISTORY, 300) if n % HISTORY]


def test_the_rate_is_that_of_the_last_steps(window):
    for number in range(1, 101):
        step(window, number, ns=10**9 if number <= 50 else 10**7, samples=2)
    sight = look(window)
    assert sight.rate() == pytest.approx(200)
    assert sight.step_ns() == pytest.approx(10**7)
    assert "200.0 tokens/s, 10.00 ms a step" in drawn(window)[-1]


def test_a_phase_gets_cells_by_its_share_of_the_time(window):
    step(window, 1, phases=(0, 0, 25, 0, 0, 50, 0, 25))
    lines = drawn(window)
    assert row(lines, "step") == "p" * 16 + "g" * 32 + "l" * 16
    assert "project   25%" in row(lines, "step", 1)
    assert "gate, up  50%" in row(lines, "step", 2)
    assert len({name[0] for name in PHASES}) == len(PHASES)


def test_the_texts_tail_is_its_last_lines_and_as_many_as_there_is_room_for():
    console = Console(width=10)
    assert tail("", 2, console).plain == "\n"
    assert tail("one two three four", 3, console).plain.split("\n") == ["one two ", "three four", ""]
    assert tail("a\nb\nc\nd", 2, console).plain == "c\nd"
    assert tail("\x1b[2Jx", 1, console).plain == "·[2Jx"
