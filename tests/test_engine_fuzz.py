"""A NIC that writes garbage harms itself only: no crash, no hang, and everybody else gets their tokens.

One worker's part of the window is written over at random, with words that make sense and words that make none;
beside it, the other worker's requests are served as ever.
"""

import os

import numpy as np
import pytest
from engine_bench import SMALL, Answer, Bench, Request, answers_alone, chosen, small

from blink_ref.ring.layout import MOST_LOGPROBS, REQUEST
from blink_ref.scheduler import state

ROUNDS = int(os.environ.get("BLINK_REF_EXAMPLES", "500")) // 20
"""Of MUTATIONS each; ``make soak`` makes it 1,000."""
MUTATIONS, PIECES = 120, 12
SLOTS, CONTEXT, ROOM = 16, 24, 40
OTHER = SLOTS // 2
"""The first slot of the innocent."""

INNOCENT = [
    Request((4, 9, 1), 5, 0.8, 11),
    Request((11,) * 14, 8, 0.0, 0, True),
    Request(tuple(range(10, 30)), 4, 1.1, 2**64 - 1, True, (("top_p", 0.7), ("logprobs", 3))),
    Request((9,), 20, 0.7, 3, True, (), (33, 34), ((12, 4.0),)),
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def alone(request):
    """What the innocent get alone, and the target."""
    answer = answers_alone(Bench(small(), settings(request.param), arena=1024))
    return [answer(each) for each in INNOCENT], request.param


def settings(target, own_block=False):
    """Half of the rounds have a block that only schedules."""
    sizes = {"context": CONTEXT, "page_size": 4, "pages": 14, "running": 4, "rows": 8, "reserved": 1}
    sizes |= {"blocks": 2 + own_block, "scheduler_block": own_block}
    return chosen(SMALL, target, slots=SLOTS, **sizes)


def some_word(draw):
    """A word of any size, mostly at the edge of something."""
    edges = [0, 1, 2, 3, 4, OTHER, SLOTS, CONTEXT, ROOM, SMALL.vocab, SMALL.vocab - 1, 2**31, 2**32 - 1, 2**32 - 2]
    return int(draw.choice([*edges, draw.integers(0, 40), draw.integers(0, 2**32)]))


def next_word(word):
    return int(word) + 1 & 0xFFFFFFFF


def likely_request(draw):
    """A request that will run, for the most part: garbage alone is refused at once."""
    return {
        "prompt_at": draw.integers(0, 100),
        "prompt_len": draw.integers(1, 16),
        "max_tokens": draw.integers(1, 12),
        "flags": draw.integers(0, 4),
        "temperature": draw.choice([0.0, 0.8]),
        "priority": draw.integers(0, 3),
        "stops": draw.integers(0, 3),
        "logprobs": draw.integers(0, 2 + MOST_LOGPROBS),
        "leader": draw.integers(0, SLOTS + 1),
        "leader_generation": draw.integers(0, 4),
        "time_ms": draw.choice([0, 0, 1]),
    }


def mutate(draw, window):
    """Write over one thing of the first worker's."""
    nic, slot = window.nic, int(draw.integers(0, OTHER))
    what = draw.integers(0, 9)
    if what == 0:
        nic["doorbell"][slot] = draw.choice([next_word(nic["doorbell"][slot]), some_word(draw)])
    elif what == 1:
        nic["cancel"][slot] = draw.choice([nic["doorbell"][slot], some_word(draw)])
    elif what == 2:
        nic["consumed"][0] = draw.choice([next_word(nic["consumed"][0]), some_word(draw)])
    elif what == 3:
        nic["urgent"][0] = some_word(draw)
    elif what == 4:
        at = draw.integers(0, window.layout.arena)
        nic["arena"][at : min(at + draw.integers(1, 40), window.layout.arena)] = some_word(draw)
    elif what == 5:
        nic["request"][slot] = np.frombuffer(draw.bytes(REQUEST.itemsize), REQUEST)[0]
    elif what == 6:
        name = draw.choice([name for name in REQUEST.names if name != "unused"])
        word = np.array(some_word(draw), np.uint32)
        nic["request"][slot][name] = word.view(np.float32) if REQUEST[name].kind == "f" else word
    else:
        for name, value in likely_request(draw).items():
            nic["request"][slot][name] = value
        nic["arena"][:100] = draw.integers(0, SMALL.vocab, 100)
        nic["doorbell"][slot] = next_word(nic["doorbell"][slot])


def play(seed, expected, target):
    """One round; raises AssertionError where the innocent do not get their tokens, or a list has got mixed up."""
    draw = np.random.default_rng(seed)
    outbox = int(draw.choice([4, 64]))
    made = Bench(small(), settings(target, seed % 2 == 1), workers=2, outbox=outbox, arena=OTHER * ROOM)
    liar, honest = made.desks
    asked = {}
    for piece in range(PIECES):
        for _ in range(MUTATIONS // PIECES):
            mutate(draw, made.window)
        free = [slot for slot in honest.slots if slot not in honest.busy()]
        settle(honest, asked, expected)
        if piece % 3 == 0 and free:
            asked[free[0]] = int(draw.integers(0, len(INNOCENT)))
            INNOCENT[asked[free[0]]].ring(honest, free[0], urgent=bool(draw.integers(0, 2)))
        made.run(int(draw.integers(1, 4)))
        honest.read()
    for _ in range(200):
        if not honest.busy():
            break
        made.run(20)
        honest.read()
    assert not honest.busy(), "nobody blocks the innocent"
    settle(honest, asked, expected)
    made.window.nic["consumed"][0] = made.view.written[0] & 0xFFFFFFFF  # the liar's outbox is read
    for slot in range(OTHER):
        made.window.nic["doorbell"][slot] = made.slots.taken[slot]
        made.window.nic["cancel"][slot] = made.slots.taken[slot]
        liar.answers[slot] = Answer([], 0)
    for _ in range(OTHER * 2):
        made.run(20)
        made.window.nic["consumed"][0] = made.view.written[0] & 0xFFFFFFFF
    liar.index = int(made.view.written[0])
    assert made.running() == made.waiting() == []
    assert not made.queue.count[state.ENDING]
    made.check()
    assert len(made.free_pages()) + len(made.unused_pages()) == made.cache.pages, "every page came back"


def settle(honest, asked, expected):
    """Who has ended got what it gets alone."""
    for slot, kind in list(asked.items()):
        if honest.answers[slot].reason:
            assert honest.answers[slot] == expected[kind]
            del asked[slot]


def test_garbage_of_one_worker_harms_no_request_of_the_other(alone):
    expected, target = alone
    for seed in range(ROUNDS):
        try:
            play(seed, expected, target)
        except AssertionError as error:
            error.add_note(f"round {seed}")
            raise
