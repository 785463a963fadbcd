"""Random histories of the whole engine: whatever comes and goes, each request gets what it gets alone."""

import functools

import numpy as np
import pytest
from engine_bench import SMALL, Bench, Request, answers_alone, chosen, small
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from blink_ref.kvcache.pages import pages_spec
from blink_ref.model.reference import Reference
from blink_ref.ring.layout import CANCEL, DECODE, FREE, LENGTH, PREFILL, READY, STOP
from blink_ref.scheduler.admit import refusal_spec
from blink_ref.scheduler.state import WAITING_HEAD, WAITING_TAIL

SLOTS, WORKERS, CONTEXT = 8, 2, 24
ENDS = {FREE, *range(DECODE + 1, 8)}
"""States that a slot shows when nothing of it waits or runs."""


@functools.cache
def alone(target: str):
    return answers_alone(Bench(small(), chosen(SMALL, target, context=CONTEXT), arena=1024))


class History(RuleBasedStateMachine):
    """Two NIC workers ask, cancel and read as they please; the kernel runs in pieces of a few steps.

    Pages, places in the batch, rows of a step and records of the outboxes are all too few.
    """

    target = "cpu"

    @initialize(
        blocks=st.integers(1, 3),
        pages=st.integers(3, 14),
        page_size=st.sampled_from([1, 3, 4, 16]),
        running=st.integers(1, 5),
        spare_rows=st.integers(0, 6),
        outbox=st.sampled_from([2, 4, 8, 64]),
    )
    def start(self, blocks, pages, page_size, running, spare_rows, outbox):
        sizes = {"pages": pages, "page_size": page_size, "running": running, "rows": running + spare_rows}
        made = chosen(SMALL, self.target, blocks=blocks, slots=SLOTS, context=CONTEXT, **sizes)
        self.made = Bench(small(), made, outbox=outbox, workers=WORKERS, arena=SLOTS * CONTEXT // WORKERS)
        self.asked: dict[int, Request] = {}
        self.cancelled: set[int] = set()

    @rule(
        worker=st.integers(0, WORKERS - 1),
        prompt=st.lists(st.integers(0, SMALL.vocab - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        seed=st.integers(0, 2**64 - 1),
        ignore_eos=st.booleans(),
    )
    def ask(self, worker, prompt, max_tokens, temperature, seed, ignore_eos):
        desk = self.made.desks[worker]
        free = [slot for slot in desk.slots if slot not in desk.busy()]
        if free:
            if free[0] in desk.answers:
                self.settle(free[0])
            self.asked[free[0]] = Request(tuple(prompt), max_tokens, temperature, seed, ignore_eos)
            desk.ring(free[0], *self.asked[free[0]])

    @rule(steps=st.integers(1, 5))
    def run(self, steps):
        made = self.made
        made.poison()
        nic, before = made.window.nic.tobytes(), made.steps
        made.run(steps)
        assert made.window.nic.tobytes() == nic, "the GPU writes its own half only"
        assert made.steps <= before + steps
        self.nobody_is_kept_waiting()

    @rule(worker=st.integers(0, WORKERS - 1), most=st.integers(1, 10))
    def read(self, worker, most):
        self.made.desks[worker].read(most)

    @rule(choice=st.integers(0, SLOTS - 1))
    def cancel(self, choice):
        busy = [slot for desk in self.made.desks for slot in desk.busy()]
        if busy:
            slot = busy[choice % len(busy)]
            self.made.desks[slot * WORKERS // SLOTS].cancel(slot)
            self.cancelled.add(slot)

    def settle(self, slot):
        """A request has ended: it got what it gets alone, or, cancelled, the beginning of that."""
        tokens, reason = self.made.desks[slot * WORKERS // SLOTS].answers[slot]
        request, chosen = self.asked.pop(slot), self.made.settings
        never = refusal_spec(len(request.prompt), request.max_tokens, CONTEXT, chosen.pages, chosen.page_size)
        if reason == CANCEL:
            assert slot in self.cancelled
        else:
            assert reason == (never or alone(self.target)(request).reason)
        if tokens:
            expected = alone(self.target)(request).tokens
            assert tokens == (expected[: len(tokens)] if reason == CANCEL else expected)
        else:
            assert reason in (CANCEL, never)
        self.cancelled.discard(slot)

    def nobody_is_kept_waiting(self):
        """After a turn of the scheduler, who heads the queue lacks a place, pages, or room for a refusal."""
        made = self.made
        if waiting := made.waiting():
            prompt, limit = int(made.slots.prompt_len[waiting[0]]), int(made.slots.limit[waiting[0]])
            worker = waiting[0] * WORKERS // SLOTS
            assert (
                len(made.running()) == made.settings.running
                or pages_spec(prompt + limit, made.settings.page_size) > len(made.free_pages())
                or made.view.written[worker] - made.desks[worker].index == made.window.layout.outbox
            )

    @invariant()
    def pages_are_owned_once(self):
        if hasattr(self, "made"):
            owned = [page for slot in range(SLOTS) for page in self.made.held_pages(slot)]
            assert sorted(owned + self.made.free_pages()) == list(range(self.made.cache.pages))

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "made"):
            return
        made, slots = self.made, self.made.slots
        running, waiting = made.running(), made.waiting()
        assert len({*running, *waiting}) == len(running) + len(waiting)
        assert len(running) <= made.settings.running
        heads = [made.queue.count[place] for place in (WAITING_HEAD, WAITING_TAIL)]
        assert 0 <= heads[1] - heads[0] <= SLOTS
        shown = made.window.gpu["state"]
        for slot in range(SLOTS):
            prompt, done, produced = (int(a[slot]) for a in (slots.prompt_len, slots.done, slots.produced))
            if slot in running:
                assert slots.pages[slot] == pages_spec(prompt + int(slots.limit[slot]), made.settings.page_size)
                assert slots.state[slot] == shown[slot] == (DECODE if produced else PREFILL)
                assert done == prompt + produced - 1 if produced else done < prompt
                assert produced < slots.limit[slot]
            else:
                assert slots.pages[slot] == 0
                assert slots.state[slot] == (READY if slot in waiting else FREE)
                assert shown[slot] == READY if slot in waiting else int(shown[slot]) in ENDS
        for worker, desk in enumerate(made.desks):
            assert 0 <= made.view.written[worker] - desk.index <= made.window.layout.outbox

    def teardown(self):
        """Let all that has been asked for end."""
        if not hasattr(self, "made"):
            return
        made = self.made
        for _ in range(1000):
            made.run()
            if not sum(desk.read() for desk in made.desks):
                break
        assert [desk.busy() for desk in made.desks] == [[], []]
        assert made.running() == made.waiting() == []
        assert len(made.free_pages()) == made.cache.pages
        for slot in list(self.asked):
            self.settle(slot)


def run_histories(target, examples, steps):
    """Hypothesis finds the shortest history that breaks something."""
    machine = type("History", (History,), {"target": target})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


def test_any_history_on_the_cpu_gives_each_request_what_it_gets_alone():
    run_histories("cpu", 100, 50)


@pytest.mark.cuda
def test_any_history_on_a_gpu_gives_each_request_what_it_gets_alone():
    run_histories("cuda", 20, 30)


def test_what_a_request_gets_alone_is_what_the_model_says():
    """So the histories compare with the truth, and not with an error that both share."""
    reference = Reference(*small())
    draw = np.random.default_rng(3)
    for _ in range(20):
        prompt = tuple(draw.integers(0, SMALL.vocab, draw.integers(1, 12)).tolist())
        tokens, reason = alone("cpu")(Request(prompt, 10))
        assert tokens == reference.generate(prompt, 10)
        assert reason == (STOP if tokens[-1] in SMALL.eos_ids else LENGTH)
