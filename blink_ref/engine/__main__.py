"""The engine's process: ``python -m blink_ref.engine --model FOLDER``.

It prints one JSON line when its kernel serves (or why it cannot), and then only waits: for the end of its
standard input, which is the end of whoever started it, for SIGTERM, or for the window's stop word.
"""

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from ..errors import BlinkError
from ..simt import choose_target
from .host import Engine


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop. 0 after an orderly end, 1 after an error, said in one JSON line."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the parent, which then closes our input
    parent = _Parent()
    try:
        chosen = choose_target(options.target), options.sms, options.scheduler_block, options.batch_invariant
        engine = Engine.load(Path(options.model), *chosen, options.kv_dtype)
    except (BlinkError, MemoryError) as error:
        return _fail(error, options.debug)
    parent.engine = engine
    try:
        signal.signal(signal.SIGTERM, lambda *_: engine.stop())
        bandwidth = engine.bandwidth()
        engine.start()
        _say(
            window=str(engine.window.path),
            target=engine.settings.target,
            pid=os.getpid(),
            bytes_per_token=engine.bytes_per_token,
            bandwidth=bandwidth,
            blocks=engine.settings.blocks,
            context=engine.settings.context,
        )
        engine.wait()
    except (BlinkError, MemoryError) as error:
        return _fail(error, options.debug)
    finally:
        engine.close()
    return 0


class _Parent:
    """Notices the end of the process that holds the other end of our standard input."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        if self.engine is not None and self.engine.started:
            self.engine.stop()
            return
        # nobody waits for what is being loaded or compiled
        if self.engine is not None:
            self.engine.close()
        os._exit(1)


def _say(**fields: object) -> None:
    try:
        print(json.dumps(fields), flush=True)
    except BrokenPipeError:  # the parent is gone; its watch ends us
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: BaseException, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    _say(error=" ".join(str(error).split()) or type(error).__name__)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m blink_ref.engine", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Llama-architecture model")
    parser.add_argument("--target", default="auto", help="auto, cuda, cpu or python")
    parser.add_argument("--sms", type=int, default=0, help="blocks; 0 = all SMs or cores")
    parser.add_argument("--scheduler-block", action=argparse.BooleanOptionalAction, help="block 0 only schedules")
    parser.add_argument("--batch-invariant", action="store_true", help="no tensor cores")
    parser.add_argument("--kv-dtype", help="float32 or bfloat16: of keys and values")
    parser.add_argument("--debug", action="store_true", help="tracebacks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
