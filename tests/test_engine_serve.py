"""The persistent kernel as a whole: bounded pieces, batches of sixteen, three targets, a debugger."""

import inspect
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from engine_bench import (
    SMALL,
    Bench,
    Request,
    answers_alone,
    answers_together,
    chosen,
    mixed_requests,
    small,
    tiny,
)

from blink_ref.engine.settings import choose
from blink_ref.errors import BlinkError
from blink_ref.kernels import attention
from blink_ref.model.reference import Reference
from blink_ref.ring.layout import SERVING, STARTING, STOPPED
from blink_ref.scheduler import admit
from blink_ref.scheduler.state import GO, IDLE, LEAVE, RUN

cuda = pytest.param("cuda", marks=pytest.mark.cuda)


# --- bounded pieces


@pytest.mark.parametrize("target", ["cpu", "python", cuda])
def test_max_steps_bounds_a_run_and_the_next_goes_on(target):
    made = Bench(small(), chosen(SMALL, target))
    made.desk.ring(0, [1, 2, 3], 7, ignore_eos=True)
    for piece, steps in ((1, 1), (3, 4), (2, 6)):
        made.run(piece)
        assert made.steps == steps
        assert made.queue.count[GO] == RUN
    made.run()
    assert made.steps == 7
    assert made.queue.count[GO] == IDLE
    made.desk.read()
    whole = Bench(small(), chosen(SMALL))
    whole.desk.ring(0, [1, 2, 3], 7, ignore_eos=True)
    whole.run()
    whole.desk.read()
    assert made.desk.answers == whole.desk.answers


@pytest.mark.parametrize("patience", [1, 2, 100])
def test_an_idle_kernel_leaves_after_as_many_turns_as_it_was_told(patience):
    made = Bench(small(), chosen(SMALL))
    made.run(patience=patience)
    assert made.queue.count[GO] == IDLE
    assert made.steps == 0
    assert made.window.gpu["heartbeat"][0] == 1 + patience // 64, "a beat at every 64th turn"


def test_the_heartbeat_says_what_the_engine_does():
    made = Bench(small(), chosen(SMALL, running=2, rows=8))
    beats = made.window.gpu["heartbeat"]
    assert beats[2] == STARTING
    for slot in range(5):
        made.desk.ring(slot, [1, 2], 9, ignore_eos=True)
    made.run(3)
    assert beats[:5].tolist() == [3, 3, SERVING, 2, 3]
    made.stop()
    assert beats[2] == STOPPED
    assert made.queue.count[GO] == LEAVE


# --- batches


def sixteen(target, requests, model, **changes):
    made = chosen(model[0], target, **changes)
    together = answers_together(Bench(model, made), requests)
    alone = answers_alone(Bench(model, made))
    return together, [alone(request) for request in requests]


@pytest.mark.parametrize("target", ["cpu", cuda])
def test_sixteen_requests_at_once_get_each_what_it_gets_alone(target):
    """Greedy and sampled, prompts from one token to many steps' rows, some ended by the model."""
    requests = mixed_requests(tiny()[0], 16, longest=100, max_tokens=40)
    together, alone = sixteen(target, requests, tiny(), context=160)
    assert together == alone
    assert len({answer.reason for answer in alone}) == 2
    assert sum(len(answer.tokens) for answer in alone) > 200


def test_five_requests_at_once_on_the_python_target_get_each_what_it_gets_alone():
    requests = mixed_requests(SMALL, 5, longest=9, max_tokens=4)
    together, alone = sixteen("python", requests, small(), lanes=2)
    assert together == alone


@pytest.mark.parametrize("target", ["cpu", cuda])
def test_a_request_gets_the_same_answer_with_any_number_of_blocks(target):
    requests = mixed_requests(tiny()[0], 6, longest=40, max_tokens=20)
    answers = [
        answers_together(Bench(tiny(), chosen(tiny()[0], target, blocks=blocks, context=64)), requests)
        for blocks in (1, 2, 3)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_a_request_fills_the_context_to_its_last_position():
    config = tiny()[0]
    prompt = np.random.default_rng(5).integers(0, config.vocab, config.context - 20).tolist()
    made = Bench(tiny(), chosen(config))
    made.desk.room = config.context
    made.desk.ring(0, prompt, 20, ignore_eos=True)
    made.run()
    made.desk.read()
    assert made.desk.answers[0].tokens == Reference(*tiny()).generate(prompt, 20, ignore_eos=True)


def test_requests_join_and_leave_between_steps():
    """One arrives when another is half done, and one that comes last ends first."""
    made, early, late = Bench(small(), chosen(SMALL)), Request((1, 2), 20, 0.7, 1, True), Request((3,), 3)
    early.ring(made.desk, 0)
    made.run(8)
    late.ring(made.desk, 1)
    made.run(5)
    made.desk.read()
    assert [made.desk.busy(), len(made.desk.answers[0].tokens)] == [[0], 12]
    made.run()
    made.desk.read()
    alone = answers_alone(Bench(small(), chosen(SMALL)))
    assert list(made.desk.answers.values()) == [alone(early), alone(late)]


def test_the_seed_decides_a_sampled_answer_and_its_slot_does_not():
    made, prompt = Bench(small(), chosen(SMALL)), (5, 6, 7)
    for slot, seed in enumerate([1, 1, 2, 2**63 + 1]):
        made.desk.ring(slot, prompt, 12, 1.0, seed, True)
    made.run()
    made.desk.read()
    first, same, *others = (answer.tokens for answer in made.desk.answers.values())
    assert first == same
    assert first not in others


# --- the python target


def test_the_python_target_says_the_same_twelve_tokens_as_the_cpu():
    """The tiny model, 2 blocks of 4 lanes."""
    config = tiny()[0]
    request = Request((16, 44, 291), 12, ignore_eos=True)
    answers = [
        answers_alone(Bench(tiny(), chosen(config, target, context=32)))(request) for target in ("cpu", "python")
    ]
    assert answers[1] == answers[0]
    assert len(answers[0].tokens) == 12


PROGRAM = """
from engine_bench import SMALL, Bench, chosen, small
made = Bench(small(), chosen(SMALL, "python", blocks=2, lanes=4))
made.desk.ring(5, [11, 12, 13], 2)
made.run()
made.desk.read()
print("tokens", len(made.desk.answers[5].tokens))
"""


def debug(tmp_path, commands):
    """What ``python -m pdb`` prints for a program that serves one request on the python target."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tests = os.path.dirname(__file__)
    path = os.pathsep.join([tests, os.path.dirname(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pdb", program],
        input="\n".join(commands) + "\n",
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout + done.stderr


def test_a_debugger_stops_in_the_scheduler_and_prints_a_slot(tmp_path):
    source, first = inspect.getsourcelines(admit.start.python)
    line = first + next(n for n, text in enumerate(source) if "queue.count[FOUND] +=" in text)
    said = debug(
        tmp_path,
        [
            f"break {admit.__file__}:{line}",
            "continue",
            "print('prompt', slots.prompt_len[slot], 'of slot', slot)",
            "up 10",  # decide, admit, plan_next, schedule, serve, and before each the call of the device function
            "print('block', block.id, 'of', block.blocks)",
            "clear 1",
            "continue",
        ],
    )
    assert "Breakpoint 1 at" in said
    assert "-> queue.count[FOUND] += done" in said
    assert "prompt 3 of slot 5" in said
    assert "block 0 of 2" in said
    assert "tokens 2" in said, "and the program goes on to its end"


# --- settings


def test_the_settings_of_a_machine_fit_their_model():
    for target, lanes in (("cpu", 1), ("python", 4)):
        made = choose(tiny()[0], target)
        assert made.lanes == lanes
        assert made.blocks == (2 if target == "python" else len(os.sched_getaffinity(0)))
        assert made.rows >= made.running
        assert made.pages * made.page_size >= made.context
        assert made.shared >= attention.arena(tiny()[0].head_dim, made.page_size, 1)


def test_a_cache_that_would_exceed_its_bytes_holds_fewer_pages_but_one_request_always():
    config = tiny()[0]
    page = 8 * config.layers * config.kv_heads * config.head_dim * 16
    assert choose(config, "cpu", cache_bytes=100 * page).pages == 100
    assert choose(config, "cpu", cache_bytes=1).pages == config.context // 16


def test_a_context_of_a_hundred_thousand_is_served_as_one_of_eight():
    assert choose(replace(SMALL, context=131072), "cpu").context == 8192


def test_more_blocks_than_asked_for_are_never_made():
    assert choose(SMALL, "cpu", sms=1).blocks == 1
    assert choose(SMALL, "python", sms=3).blocks == 3


@pytest.mark.cuda
def test_more_blocks_than_the_gpu_has_sms_are_refused():
    with pytest.raises(BlinkError, match="--sms 100000 asks for more blocks than this GPU's"):
        choose(SMALL, "cuda", sms=100000)


def test_a_model_that_no_block_can_stage_a_row_of_is_refused(monkeypatch):
    pytest.importorskip("numba_cuda", reason="pip install 'blink-ref[cuda13]'")
    from blink_ref.simt import on_cuda

    monkeypatch.setattr(on_cuda, "limits", lambda: on_cuda.Limits("T4", 40, 65536, 1 << 33))
    assert choose(SMALL, "cuda").blocks == 40
    wide = replace(SMALL, ffn=100_000)
    with pytest.raises(BlinkError, match=r"needs 4\d{5} bytes of shared memory a block for a row of 100000"):
        choose(wide, "cuda")
