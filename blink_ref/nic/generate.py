"""``blink-ref generate``: one prompt through the whole path. This process is the NIC, its child the engine."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.ring.layout import BEAT_STEPS, LENGTH, REASONS, STOP, TIME

from .client import Event, Nic
from .detokenize import Detokenizer
from .engine_process import Engine, engine_process
from .parameters import Parameters
from .watch import Watch, can_watch

DEFAULT_MAX_TOKENS = 128


@dataclass
class Answer:
    """What came for a prompt, and when: seconds on the monotonic clock."""

    submitted: float
    token_ids: list[int] = field(default_factory=list)
    scores: list[dict[str, object]] = field(default_factory=list)
    text: str = ""
    first: float = 0.0
    last: float = 0.0
    reason: int = 0

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where all came at once, between two looks at the outbox."""
        return (self.last - self.first) / (len(self.token_ids) - 1) if self.last > self.first else None


def run(args: argparse.Namespace) -> int:
    """The command. Raises BlinkError."""
    if args.logprobs is not None and not args.json:
        raise BlinkError("--logprobs are printed by --json only; add it")
    text = _read_standard_input() if args.prompt == "-" else args.prompt
    path = resolve(args.model)
    config, tokenizer = ModelConfig.load(path), Tokenizer.load(path)
    if args.chat:
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
    else:
        prompt = tokenizer.encode(text, allow_special=True)
    # Once more when it is submitted, but an engine takes a while to start.
    request_parameters(args, config.context - len(prompt)).check(prompt, config.context, config.vocab)
    with engine_process(
        path, args.target, args.sms, args.debug, args.scheduler_block, args.batch_invariant, args.kv_dtype
    ) as engine:
        with _output(args, engine, config.name) as show:
            answer = _generate(Nic(engine.window), tokenizer, prompt, args, show)
        steps = int(engine.window.gpu["heartbeat"][BEAT_STEPS])
        if args.json:
            print(json.dumps(_report(answer, prompt, engine, config.name, steps)))
        else:
            if not answer.text.endswith("\n"):
                _print_piece("\n")
            print(_summary(answer, engine), file=sys.stderr)
    return 0


@contextmanager
def _output(args: argparse.Namespace, engine: Engine, model: str) -> Iterator[Callable[[str], object]]:
    """What takes the pieces of the answer; it is also called, with no text, while there are none."""
    if args.json:
        yield lambda piece: None
    elif args.watch and can_watch():
        with Watch(engine.window, f"{model} on {engine.ready.target}, {engine.ready.blocks} blocks") as watch:
            yield watch.show
    else:
        yield _print_piece


def request_parameters(args: argparse.Namespace, room: int) -> Parameters:
    """What the command line asks for; ``room`` tokens of the context are left for the answer."""
    return Parameters(
        max_tokens=args.max_tokens or max(1, min(max(DEFAULT_MAX_TOKENS, args.min_tokens), room)),
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        priority=args.priority,
        urgent=args.urgent,
        min_tokens=args.min_tokens,
        time_ms=math.ceil(args.timeout * 1000),
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition=args.repetition_penalty,
        presence=args.presence_penalty,
        frequency=args.frequency_penalty,
        stop_ids=args.stop_id,
        logprobs=args.logprobs,
    )


def _generate(
    nic: Nic, tokenizer: Tokenizer, prompt: list[int], args: argparse.Namespace, show: Callable[[str], object]
) -> Answer:
    detokenizer = Detokenizer(tokenizer)
    answer = Answer(submitted=time.monotonic())
    nic.submit_samples(prompt, request_parameters(args, nic.context - len(prompt)), 1)
    while nic.running:
        events = nic.poll()
        now = time.monotonic()
        for event in events:
            if event.token is None:
                answer.reason = event.reason or 0
                piece = detokenizer.finish()
            else:
                answer.first = answer.first or now
                answer.last = now
                answer.token_ids.append(event.token)
                answer.scores += _scores(event)
                piece = detokenizer.add(event.token)
            answer.text += piece
            show(piece)
        if not events:
            show("")
            time.sleep(nic.pause())
    if answer.reason not in (STOP, LENGTH, TIME):
        raise BlinkError(f"the request {REASONS[answer.reason]}")
    return answer


def _scores(event: Event) -> list[dict[str, object]]:
    """What the JSON object says of a token's log probabilities, if they were asked for."""
    scores = event.logprobs
    return [{"id": event.token, "logprob": scores.token, "likeliest": scores.likeliest}] if scores else []


def _read_standard_input() -> str:
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BlinkError(
            f"byte {error.start} of standard input, {raw[error.start]:#04x}, is not UTF-8; convert it first"
        ) from None


def _print_piece(piece: str) -> None:
    if piece:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _report(answer: Answer, prompt: list[int], engine: Engine, model: str, steps: int) -> dict[str, object]:
    tpot = answer.tpot
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_ids": prompt,
        "logprobs": answer.scores or None,
        "ttft_ms": (answer.first - answer.submitted) * 1e3 if answer.token_ids else None,
        "tpot_ms": tpot and tpot * 1e3,
        "tokens_per_s": tpot and 1 / tpot,
        "target": engine.ready.target,
        "model": model,
        "engine_pid": engine.ready.pid,
        "nic_pid": os.getpid(),
        "finish_reason": REASONS[answer.reason],
        "steps": steps,
    }


def _summary(answer: Answer, engine: Engine) -> str:
    if not answer.token_ids:
        return f"{engine.ready.target}: no token came in time"
    line = f"{engine.ready.target}: first token after {(answer.first - answer.submitted) * 1e3:.0f} ms"
    if tpot := answer.tpot:
        floor = engine.ready.bytes_per_token / engine.ready.bandwidth
        line += f", {1 / tpot:.1f} tokens/s, {floor / tpot:.0%} of the memory-bandwidth floor"
    return line
