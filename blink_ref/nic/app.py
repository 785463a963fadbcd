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
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from blink_ref.errors import BlinkError
from blink_ref.model.tokenizer import Tokenizer
from blink_ref.ring.layout import BAD_REQUEST, LENGTH, NO_PAGES, REASONS, SHUTDOWN, STOP, TOO_LONG

from .client import Busy, EngineGone, Nic
from .detokenize import Detokenizer
from .dispatch import Dispatcher, Generation
from .engine_process import Engine
from .openai import ApiError, Call, parse
from .replies import DONE, Reply, event

MAX_BODY = 4 << 20
"""Bytes; prompts of any context in use fit many times."""
STATUS_OF = {TOO_LONG: 400, NO_PAGES: 400, BAD_REQUEST: 500, SHUTDOWN: 503}
CLIENT_GONE = 499
"""nginx's status for its log; nobody receives it."""

T = TypeVar("T")


class Answer:
    """The text of one request as it comes; when it is all there, ``reason`` and the number of ``tokens``."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self._detokenizer = Detokenizer(tokenizer)
        self.tokens = 0
        self.reason = ""

    async def pieces(self) -> AsyncIterator[str]:
        """A piece of text, maybe empty, for each token. Raises ApiError, EngineGone: it failed."""
        async for _, token, reason in self.generation:
            if token is not None:
                self.tokens += 1
                yield self._detokenizer.add(token)
                continue
            assert reason is not None
            self.reason = REASONS[reason]
            if reason not in (STOP, LENGTH):
                raise ApiError(STATUS_OF[reason], f"the request {self.reason}")
            yield self._detokenizer.finish()


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
        generation = self._dispatcher.start(
            prompt,
            call.max_tokens or max(1, self._nic.context - len(prompt)),
            temperature=call.temperature,
            seed=call.seed,
            ignore_eos=call.ignore_eos,
        )
        answer = Answer(generation, self._tokenizer)
        reply = Reply(chat, self._model, len(prompt), call.include_usage)
        try:
            if not call.stream:
                text = await _unless_gone(request, _joined(answer.pieces()))
                return JSONResponse(reply.whole(text, answer.reason, answer.tokens))
            # The first token before the status line: a request that fails at once fails with its status.
            pieces = answer.pieces()
            first = await _unless_gone(request, anext(pieces))
        except BaseException:
            generation.cancel()
            raise
        return EventStream(_events(reply, answer, first, pieces, call.include_usage), generation)

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
        _, steps, _, running, waiting, *_ = self._engine.window.gpu["heartbeat"].tolist()
        health = {
            "status": status,
            "engine_pid": self._engine.ready.pid,
            "nic_pid": os.getpid(),
            "target": self._engine.ready.target,
            "steps": steps,
            "running": running,
            "waiting": waiting,
        }
        return JSONResponse(health, 200 if status == "ok" else 503)


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
    reply: Reply, answer: Answer, first: str, rest: AsyncIterator[str], counted: bool
) -> AsyncIterator[bytes]:
    if opening := reply.first():
        yield event(opening)
    if first:
        yield event(reply.piece(first))
    try:
        async for piece in rest:
            if piece:
                yield event(reply.piece(piece))
    except (ApiError, BlinkError) as error:
        # The status has long been sent. No [DONE]: it is not.
        yield event(_api_error(error).body())
        return
    yield event(reply.last(answer.reason))
    if counted:
        yield event(reply.usage(answer.tokens))
    yield DONE


async def _joined(pieces: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in pieces])


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
