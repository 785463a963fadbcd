"""``blink-ref serve``: the OpenAI API on a port. This process is the NIC, its child the engine."""

import argparse
import asyncio
import errno
import json
import os
import socket
import sys
from types import FrameType

import uvicorn

from blink_ref.errors import BlinkError
from blink_ref.model.config import ModelConfig
from blink_ref.model.store import resolve
from blink_ref.model.tokenizer import Tokenizer

from .app import Api
from .client import EngineGone, Nic
from .dispatch import Dispatcher
from .engine_process import Engine, engine_process

LAST_WORDS = 3
"""Seconds that clients have to take what was sent when the server ends."""


def run(args: argparse.Namespace) -> int:
    """The command. Raises BlinkError, and KeyboardInterrupt or SystemExit when a signal has ended it."""
    path = resolve(args.model)
    config, tokenizer = ModelConfig.load(path), Tokenizer.load(path)
    # The port first: an engine takes a while to start.
    with (
        _listen(args.host, args.port) as listener,
        engine_process(
            path, args.target, args.sms, args.debug, args.scheduler_block, args.batch_invariant, args.kv_dtype
        ) as engine,
    ):
        _announce(args.json, config.name, listener, engine)
        asyncio.run(_serve(listener, engine, tokenizer, config.name))
    return 0


class Server(uvicorn.Server):
    """uvicorn, which on a signal waits for its clients; here they are told first that nothing will come."""

    def __init__(self, config: uvicorn.Config, dispatcher: Dispatcher) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self._loop.call_soon_threadsafe(self._dispatcher.abandon, EngineGone("the server is shutting down"))
        super().handle_exit(sig, frame)


async def _serve(listener: socket.socket, engine: Engine, tokenizer: Tokenizer, model: str) -> None:
    nic = Nic(engine.window)
    dispatcher = Dispatcher(nic)
    config = uvicorn.Config(
        Api(dispatcher, nic, engine, tokenizer, model).application(),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=LAST_WORDS,
    )
    server = Server(config, dispatcher)
    # In a group: should the poller end by an error, the server does not go on as if all were well.
    async with asyncio.TaskGroup() as tasks:
        poller = tasks.create_task(dispatcher.run())
        await server.serve([listener])
        poller.cancel()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = f"{host}:{port} cannot be listened on ({getattr(error, 'strerror', None) or error})"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            reason = f"port {port} of {host} is taken"
        raise BlinkError(f"{reason}; pass another --host or --port (0 picks a free port)") from None


def _announce(as_json: bool, model: str, listener: socket.socket, engine: Engine) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if as_json:
        said = {"url": url, "model": model, "target": engine.ready.target}
        print(json.dumps({**said, "engine_pid": engine.ready.pid, "nic_pid": os.getpid()}), flush=True)
    else:
        print(f"{model} on {engine.ready.target} at {url}; ctrl-C ends it", file=sys.stderr)
