"""``blink-ref bench kernels``: steps that an engine has timed, what they cost, and the picture."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from engine_bench import load
from processes import Bench

from blink_ref.errors import BlinkError
from blink_ref.model.store import TINY
from blink_ref.nic.sight import Step
from blink_ref.ring.layout import PHASES
from blink_ref.roofline import costs, measure
from blink_ref.roofline.ceilings import Ceilings
from blink_ref.roofline.measure import Figures, Phase, Work
from blink_ref.roofline.picture import COLOURS, picture

GIGA = 10**9


def test_a_step_costs_what_its_phases_cost():
    config, _ = load("tiny")
    parts = costs.phases(config, rows=3, samples=2, positions=10)
    assert list(parts) == list(PHASES[1:])
    assert costs.step(config, 3, 2, 10) == tuple(map(sum, zip(*parts.values(), strict=True)))
    assert "logits" not in costs.phases(config, rows=3, samples=0, positions=10)


def test_rows_of_one_request_read_its_positions_once():
    config, _ = load("tiny")
    (apart, flops), (shared, same) = (costs.phases(config, 8, 0, 10, requests)["attend"] for requests in (0, 1))
    assert (apart, flops) == (8 * shared, same)


def test_keys_and_values_in_half_the_room_take_half_the_reads():
    config, _ = load("tiny")
    wide, narrow = (costs.phases(config, 8, 0, 10, kv_bytes=size)["attend"] for size in (4, 2))
    assert (wide[0], wide[1]) == (2 * narrow[0], narrow[1])
    parts = costs.phases(config, 3, 2, 10, kv_bytes=2)
    assert costs.step(config, 3, 2, 10, kv_bytes=2) == costs.total(list(parts.values()))


def test_the_least_time_is_the_memorys_or_the_arithmetics_and_the_memorys_where_that_is_not_known():
    assert Ceilings(10.0, 100.0).seconds(20, 50) == 2.0
    assert Ceilings(10.0, 100.0).seconds(20, 500) == 5.0
    assert Ceilings(10.0, 0.0).seconds(20, 500) == 2.0


def step(number: int, decode: int, prefill: int, samples: int, ns: int) -> tuple[Step, float]:
    """A step whose phases take 1, 2, 3, ... times `ns`, and where its requests were."""
    phases = tuple(ns * (1 + n) for n in range(len(PHASES)))
    return Step(number, decode, prefill, samples, sum(phases), phases), 20.0 + number


def test_only_steps_in_which_all_generate_count_and_of_those_the_median():
    config, _ = load("tiny")
    mixed = [step(1, 1, 8, 1, 999), step(2, 2, 0, 2, 30), step(3, 2, 0, 2, 10), step(4, 2, 0, 2, 20)]
    found = measure._figures(config, Work(2, 3), mixed)
    assert (found.steps, found.rows, found.positions) == (3, 2, 23)
    assert [round(phase.seconds * GIGA) for phase in found.phases] == [20 * (1 + n) for n in range(8)]
    assert round(found.step.seconds * GIGA) == 20 * 36
    assert (found.phases[0].bytes, found.phases[0].flops) == (0, 0)
    assert (found.step.bytes, found.step.flops) == costs.step(config, 2, 2, 23)


def test_of_a_prompt_the_full_steps_count():
    config, _ = load("tiny")
    seen = [step(1, 0, 32, 0, 10), step(2, 0, 32, 0, 30), step(3, 0, 32, 0, 20), step(4, 0, 6, 1, 5)]
    found = measure._figures(config, Work(0, 102), seen)
    assert (found.steps, found.rows, found.positions) == (3, 32, 48)
    assert (found.step.bytes, found.step.flops) == costs.step(config, 32, 0, 48, 1)


def test_a_batch_that_never_was_is_an_error():
    config, _ = load("tiny")
    with pytest.raises(BlinkError, match=r"no step did 3 requests.*ask for fewer"):
        measure._figures(config, Work(3, 9), [step(1, 2, 0, 2, 10)])


def test_answers_are_long_enough_to_time_each_layer_and_fit_the_context():
    config, _ = load("tiny")
    decode, prompt = measure.works(config, context=512, batches=[4], prompt=256)
    assert (decode, prompt) == (Work(4, 3 * config.layers), Work(0, 256))
    short, prompt = measure.works(config, context=32, batches=[4], prompt=256)
    assert (short, prompt) == (Work(4, 8), Work(0, 31))


MOST = Ceilings(10 * GIGA, 100 * GIGA)


def figures(*phases: Phase) -> list[Figures]:
    return [Figures(Work(1, 8), 5, 1, 20, list(phases), Phase("step", 1.0, GIGA, 50 * GIGA))]


def drawn(most: Ceilings, *phases: Phase):
    """Of the picture: the roof's corners, and the points by colour."""
    svg = ElementTree.fromstring(picture(figures(*phases), most, "<a> & b"))
    (roof,) = [e.get("d") for e in svg.iter() if e.get("stroke-width") == "2"]
    numbers = list(map(float, re.findall(r"[\d.]+", roof)))
    points = {
        each.get("fill"): (float(each.get("cx")), float(each.get("cy")))
        for group in svg.iter()
        if group.tag.endswith("}g")
        for each in group
        if each.tag.endswith("circle")
    }
    return numbers, points


def test_what_reaches_the_roof_lies_on_it_and_what_does_not_below():
    memory = Phase("attend", 1.0, 10 * GIGA, 5 * GIGA)  # all that the memory gives
    slow = Phase("project", 2.0, 10 * GIGA, 5 * GIGA)
    arithmetic = Phase("down", 1.0, GIGA, 100 * GIGA)
    (x0, y0, x1, y1, end), points = drawn(MOST, memory, slow, arithmetic)
    x, y = points[COLOURS["attend"]]
    assert y == pytest.approx(y0 + (x - x0) * (y1 - y0) / (x1 - x0), abs=0.1)
    assert points[COLOURS["project"]][0] == x
    assert points[COLOURS["project"]][1] > y
    x, y = points[COLOURS["down"]]
    assert x1 < x < end
    assert y == pytest.approx(y1, abs=0.1)


def test_without_a_figure_for_the_arithmetic_the_roof_has_no_flat_part():
    numbers, points = drawn(Ceilings(10 * GIGA, 0.0), Phase("attend", 1.0, 10 * GIGA, 5 * GIGA))
    assert len(numbers) == 4
    assert set(points) == {COLOURS["attend"], COLOURS["step"]}


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_the_command_measures_the_engine_that_serves(bench, tmp_path):
    svg = tmp_path / "roofline.svg"
    command = ["bench", "kernels", "--model", str(TINY), "--target", "cpu", "--picture", str(svg)]
    command += ["--requests", "1", "3", "--prompt", "100"]
    said = json.loads(bench.run(*command, "--json")[0])
    config, _ = load("tiny")
    one, three, prompt = said["work"]
    assert [work["rows"] for work in said["work"]] == [1, 3, 32]
    for work, most in ((one, 3 * config.layers + 16), (three, 3 * config.layers + 48)):
        assert 3 * config.layers - 2 <= work["steps"] <= most
        assert 16 <= work["positions"] <= 16 + most
    assert prompt["steps"] >= 9
    for work in said["work"]:
        assert [phase["name"] for phase in work["phases"]] == list(PHASES)
        assert work["step"]["bytes"] == sum(phase["bytes"] for phase in work["phases"])
        spent = sum(phase["seconds"] for phase in work["phases"])
        assert 0.2 < spent / work["step"]["seconds"] < 5  # medians of phases are of other steps than that of steps
    assert prompt["phases"][-1]["bytes"] == 0, "a step in the middle of a prompt has no logits"
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    text = bench.run(*command)[0]
    assert text.count("of roof") == 3
    assert "3 requests, a token each a step: 3 rows of" in text


def test_a_folder_that_is_not_there_is_named_before_anything_runs(bench):
    _, err = bench.run("bench", "kernels", "--picture", "/nowhere/roofline.svg", code=1)
    assert err == "blink-ref: error: there is no folder /nowhere for the picture; make it first\n"
