"""Random histories of the whole engine: whatever comes and goes, each request gets what it gets alone."""

import functools
import os

import numpy as np
import pytest
from engine_bench import SMALL, Bench, Request, answers_alone, chosen, interruptible, small  # noqa: F401
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from blink_ref.kvcache.pages import pages_spec
from blink_ref.model.reference import Reference
from blink_ref.ring.layout import BAD_REQUEST, CANCEL, LENGTH, STOP
from blink_ref.scheduler import state
from blink_ref.scheduler.admit import refusal_spec
from blink_ref.scheduler.rehearsal import REHEARSAL
from blink_ref.scheduler.residence import RECORDS_A_SAMPLE

EXAMPLES = int(os.environ.get("BLINK_REF_EXAMPLES", "500"))
"""``make soak`` sets it to 20,000."""

SLOTS, WORKERS, CONTEXT = 8, 2, 24
pytestmark = pytest.mark.usefixtures("interruptible")


@functools.cache
def alone(target: str):
    return answers_alone(Bench(small(), chosen(SMALL, target, context=CONTEXT), arena=1024))


BASES = [tuple(np.random.default_rng(n).integers(0, SMALL.vocab, 20).tolist()) for n in range(2)]
"""Texts that many prompts begin with."""

prompts = st.one_of(
    st.lists(st.integers(0, SMALL.vocab - 1), min_size=1, max_size=20),
    st.builds(
        lambda base, n, end: [*base[:n], *end],
        st.sampled_from(BASES),
        st.integers(1, 18),
        st.lists(st.integers(0, SMALL.vocab - 1), max_size=2),
    ),
)

filters = st.lists(
    st.sampled_from(
        [
            ("top_k", 3),
            ("top_p", 0.7),
            ("min_p", 0.2),
            ("repetition", 1.3),
            ("presence", 0.5),
            ("frequency", 0.4),
            ("min_tokens", 1),
            ("logprobs", 3),
        ]
    ),
    unique_by=lambda field: field[0],
    max_size=3,
)

requests = st.builds(
    Request,
    prompts.map(tuple),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.one_of(st.just(()), filters.map(tuple)),
    st.lists(st.integers(0, SMALL.vocab - 1), max_size=2).map(tuple),
    st.sampled_from([(), ((11, 5.0), (12, 5.0))]),
)


class History(RuleBasedStateMachine):
    """Two NIC workers ask, cancel and read as they please; the kernel runs in pieces of a few steps.

    Pages, places in the batch, rows of a step and records of the outboxes are all too few. Steps are
    interrupted between two layers, and requests of all priorities come in while they are.
    """

    target = "cpu"
    checked = False

    @initialize(
        seed=st.integers(0, 1000),
        blocks=st.integers(1, 3),
        pages=st.integers(3, 14),
        page_size=st.sampled_from([1, 3, 4, 16]),
        running=st.integers(1, 5),
        reserved=st.integers(0, 1),
        spare_rows=st.integers(0, 6),
        outbox=st.sampled_from([2, 4, 8, 64]),
        sharing=st.booleans(),
        own_block=st.booleans(),
        rehearsals=st.booleans(),
    )
    def start(
        self, seed, blocks, pages, page_size, running, reserved, spare_rows, outbox, sharing, own_block, rehearsals
    ):
        made = chosen(
            SMALL,
            self.target,
            blocks=blocks + own_block,
            slots=SLOTS,
            context=CONTEXT,
            pages=pages,
            page_size=page_size,
            running=running,
            reserved=min(reserved, running - 1),
            rows=running + spare_rows,
            sharing=sharing,
            scheduler_block=own_block,
            rehearsals=rehearsals,
        )
        self.made = Bench(small(), made, outbox=outbox, workers=WORKERS, arena=SLOTS * 32 // WORKERS, events=64)
        self.made.seed = seed if self.checked else None
        self.asked: dict[int, Request] = {}
        self.cancelled: set[int] = set()

    @rule(
        worker=st.integers(0, WORKERS - 1),
        request=requests,
        urgent=st.booleans(),
        priority=st.integers(0, 2),
        leader=st.integers(0, SLOTS),
    )
    def ask(self, worker, request, urgent, priority, leader):
        desk = self.made.desks[worker]
        free = [slot for slot in desk.slots if slot not in desk.busy()]
        if not free:
            return
        slot = free[0]
        if slot in desk.answers:
            self.settle(slot)
        if leader and leader - 1 in self.asked:  # one of n samples of the same prompt, or nearly
            request = request._replace(prompt=self.asked[leader - 1].prompt)
        self.asked[slot] = request
        generation = int(self.made.window.nic["doorbell"][leader - 1]) if leader else 0
        others = {"leader": leader, "leader_generation": generation, "priority": priority, "urgent": urgent}
        request.ring(desk, slot, **others)

    @rule(steps=st.integers(1, 5))
    def run(self, steps):
        made = self.made
        made.poison()
        nic, before = made.window.nic.tobytes(), made.steps
        made.run(steps, patience=REHEARSAL + 1)
        assert made.window.nic.tobytes() == nic, "the GPU writes its own half only"
        assert made.steps <= before + steps
        self.nobody_is_kept_waiting()

    @rule(layers=st.lists(st.integers(0, SMALL.layers), max_size=2), traced=st.booleans())
    def interrupt(self, layers, traced):
        self.made.interrupt(*layers)
        self.made.window.nic["trace"][0] = traced

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
        if dict(request.filters).get("min_tokens", 0) > request.max_tokens:
            never = BAD_REQUEST
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
        """After a turn of the scheduler, who heads the queue lacks a place, pages, or its leader's pages.

        Or a reader: who may send nothing is passed by. A scheduler with a block of its own has had its turn before
        the last step ended.
        """
        made = self.made
        if made.settings.scheduler_block:
            return
        able = [s for s in made.waiting() if made.view.room[s * WORKERS // SLOTS] >= RECORDS_A_SAMPLE]
        if not able or made.queue.count[state.PAUSED] or made.plan.count[state.CHUNKS]:
            return
        head = able[0]
        if not made.slots.leader[head] and not made.slots.flight[head]:
            known = max(int(made.slots.known[head]), int(made.slots.prompt_len[head]))
            needed = pages_spec(known + 1, made.settings.page_size)
            ordinary = sum(not made.slots.urgent[slot] for slot in made.running())
            assert (
                len(made.running()) == made.settings.running
                or ordinary >= made.settings.running - made.settings.reserved
                or needed > len(made.free_pages()) + len(made.unused_pages())
            )

    @invariant()
    def all_is_as_it_should_be(self):
        if hasattr(self, "made"):
            self.made.check()

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
        made.check()
        assert len(made.free_pages()) + len(made.unused_pages()) == made.cache.pages
        for slot in list(self.asked):
            self.settle(slot)


def run_histories(target, examples, steps, checked=False):
    """Hypothesis finds the shortest history that breaks something."""
    machine = type("History", (History,), {"target": target, "checked": checked})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


def test_any_history_on_the_cpu_gives_each_request_what_it_gets_alone():
    run_histories("cpu", EXAMPLES, 50)


def test_any_history_has_no_race_and_reads_nothing_that_nobody_wrote():
    run_histories("python", max(1, EXAMPLES // 100), 10, checked=True)


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
