"""The HTTP application: routes, bodies in, answers out, and what happens when a client leaves."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blink_ref.errors import BlinkError
from blink_ref.model.tokenizer import Tokenizer

from . import counts
from .answer import Answer, Piece
from .client import Busy, EngineGone, Nic
from .dispatch import Dispatcher, Generation
from .engine_process import Engine
from .openai import Call, parse
from .options import renamed
from .parameters import BadParameter, Parameters
from .replies import DONE, Reply, event
from .values import ApiError

MAX_BODY = 4 << 20
"""Bytes; prompts of any context in use fit many times."""
CLIENT_GONE = 499
"""nginx's status for its log; nobody receives it."""

T = TypeVar("T")


class Api:
    """The handlers, and what they share."""

    def __init__(self, dispatcher: Dispatcher, nic: Nic, engine: Engine, tokenizer: Tokenizer, model: str) -> None:
        self._dispatcher, self._nic, self._engine = dispatcher, nic, engine
        self._tokenizer, self._model = tokenizer, model
        self._created = int(time.time())

    def application(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/chat/completions", self._chat_completion, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers=dict.fromkeys(
                (ApiError, BlinkError, HTTPException, ClientDisconnect, Exception), _refusal
            ),
        )

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat_completion(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        call = parse(await _json(request), chat, self._model)
        # In a thread: a long prompt takes a while, and other requests' tokens should not wait for it.
        prompt = await asyncio.to_thread(self._encode, call)
        generation = self._start(prompt, call, chat)
        answer = Answer(generation, self._tokenizer, call.n)
        reply = Reply(chat, self._model, len(prompt), call.include_usage, self._tokenizer.token_bytes)
        pieces = answer.pieces()
        try:
            if not call.stream:
                samples = await _unless_gone(request, _by_sample(pieces, call.n))
                return JSONResponse(reply.whole(samples, answer.tokens))
            # The first token before the status line: a request that fails at once fails with its status.
            first = await _unless_gone(request, anext(pieces))
        except BaseException:
            generation.cancel()
            raise
        return EventStream(_events(reply, answer, call, first, pieces), generation)

    def _start(self, prompt: list[int], call: Call, chat: bool) -> Generation:
        # All that fits costs nothing beforehand: the GPU gives a request its pages as its answer grows.
        max_tokens = call.max_tokens or max(1, self._nic.context - len(prompt))
        try:
            return self._dispatcher.start(prompt, Parameters(max_tokens, **call.options), call.n)
        except BadParameter as error:
            raise renamed(error, chat) from None

    def _encode(self, call: Call) -> list[int]:
        if call.messages is not None:
            return self._tokenizer.encode_chat(call.messages)
        if isinstance(call.prompt, str):
            return self._tokenizer.encode(call.prompt, allow_special=True)
        assert call.prompt is not None
        return call.prompt

    async def _models(self, request: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": self._created, "owned_by": "blink_ref"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        try:
            self._nic.check()
            status = "ok"
        except EngineGone as gone:
            status = str(gone)
        health = {
            "status": status,
            "engine_pid": self._engine.ready.pid,
            "nic_pid": os.getpid(),
            "target": self._engine.ready.target,
            **counts.read(self._engine.window),
        }
        return JSONResponse(health, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(counts.prometheus(self._engine.window), media_type="text/plain; version=0.0.4")


class EventStream(StreamingResponse):
    """Server-sent events; whenever and however it ends, the request behind it ends too."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _events(
    reply: Reply, answer: Answer, call: Call, first: Piece, rest: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    for sample in range(call.n):
        if opening := reply.first(sample):
            yield event(opening)
    for chunk in reply.chunks(first):
        yield event(chunk)
    try:
        async for piece in rest:
            for chunk in reply.chunks(piece):
                yield event(chunk)
    except (ApiError, BlinkError) as error:
        # The status has long been sent. No [DONE]: it is not.
        yield event(_api_error(error).body())
        return
    if call.include_usage:
        yield event(reply.usage(answer.tokens))
    yield DONE


async def _by_sample(pieces: AsyncIterator[Piece], n: int) -> list[list[Piece]]:
    samples: list[list[Piece]] = [[] for _ in range(n)]
    async for piece in pieces:
        samples[piece.sample].append(piece)
    return samples


async def _json(request: Request) -> Any:
    size, body = 0, b""
    # Read to the end even if it is too much: a client that still writes would not see the answer.
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
    if size > MAX_BODY:
        raise ApiError(413, f"the body has {size} bytes; at most {MAX_BODY} are read")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``. Raises ClientDisconnect: the client left first; ``work`` is then cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case Busy():
            return ApiError(429, str(error), code="rate_limit_exceeded")
        case EngineGone():
            return ApiError(503, str(error), code="engine_gone")
        case BlinkError():
            return ApiError(400, str(error))
        case HTTPException():
            return ApiError(error.status_code, error.detail)
    return ApiError(500, "internal error; the server's log has its traceback")


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    known = _api_error(error)
    if isinstance(error, HTTPException):  # 404 and 405, which say nothing of the request
        known = ApiError(known.status, f"{request.method} {request.url.path}: {known}")
    headers = dict(getattr(error, "headers", None) or {})
    if known.status == 429:
        headers["retry-after"] = "1"
    return JSONResponse(known.body(), known.status, headers)
