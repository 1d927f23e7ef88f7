"""The HTTP server: routes and transport. What bodies mean is in `protocol`."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from inferax.engine.async_engine import AsyncEngine, Stream
from inferax.engine.outputs import Delta
from inferax.errors import (
    EngineClosedError,
    EngineDeadError,
    InferaxError,
    QueueFullError,
    RequestError,
    TemplateError,
    UnsupportedError,
)
from inferax.serving.exposition import exposition
from inferax.serving.protocol.fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from inferax.serving.protocol.openai import chat_work, completion_work, error_body, failed, render
from inferax.serving.protocol.work import Answer, Work

_KEEP_ALIVE_S = 15.0
_RETRY = {"Retry-After": "1"}


def create_app(
    engine: AsyncEngine, model: str, *, api_keys: Sequence[str] = (), keep_alive_s: float = _KEEP_ALIVE_S
) -> FastAPI:
    """An app that serves `engine` under the name `model`, and shuts it down at its own end.

    api_keys: one of them must come with every request but `/health`; none: no key is needed. keep_alive_s: a comment
    goes out on a stream that had nothing to say for that long.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.shutdown()

    app = FastAPI(title="inferax", version=version("inferax"), lifespan=lifespan, docs_url=None, redoc_url=None)
    created = int(time.time())
    card = {"id": model, "object": "model", "created": created, "owned_by": "inferax"}
    card["max_model_len"] = engine.max_model_len

    def check_model(name: str | None) -> None:
        if name not in (None, model):
            raise _NoSuchModel(name or "", model)

    async def serve(request: Request, work: Work) -> Response:
        streams = await _submit(engine, work)
        answer = work.answer_from(streams)
        if work.stream:
            events = _events(request, streams, answer, keep_alive_s)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async with _aborting(request, streams):
            async for _ in _merged(streams):
                pass
        error = failed(streams)
        if error is not None:
            raise error
        return JSONResponse(answer.whole(), headers={"X-Request-Id": work.request_id})

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        check_model(body.model)
        return await serve(request, await chat_work(engine, body, model))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        check_model(body.model)
        return await serve(request, await completion_work(engine, body, model))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return card

    async def rendered(body: TokenizeBody) -> tuple[str | None, list[int]]:
        check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "give either prompt or messages")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise RequestError("add_special_tokens", "it goes with prompt; a template writes its own")
            return await render(engine, body)
        for name in ("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise RequestError(name, "it goes with messages")
        return await engine.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        _, ids = await rendered(body)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [engine.model.tokenizer.token_text(token) for token in ids]
        return found

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(body.model)
        _, ids = await engine.encode(body.tokens)
        return {"prompt": engine.model.tokenizer.decode(ids)}

    @app.post("/apply-template")
    async def apply_template(body: TokenizeBody) -> dict[str, Any]:
        if body.messages is None:
            raise RequestError("messages", "they are what a template is applied to")
        if body.return_token_strs is not None:
            raise RequestError("return_token_strs", "it is a field of /tokenize")
        return {"prompt": (await rendered(body))[0]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        state = {"ready": engine.ready, "running": engine.is_running, "stuck": engine.stuck}
        return JSONResponse(state, 200 if engine.ready else 503, None if engine.ready else _RETRY)

    @app.get("/version")
    async def versions() -> dict[str, Any]:
        return {"version": version("inferax")}

    @app.get("/metrics")
    async def metrics() -> Response:
        text, media_type = exposition(engine.metrics(), model)
        return Response(text, headers={"Content-Type": media_type})

    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(InferaxError, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)
    if api_keys:
        app.add_middleware(_Keys, keys=tuple(api_keys))
    return app


class _NoSuchModel(InferaxError):
    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"model: {name!r} is not served here; {served!r} is")


async def _submit(engine: AsyncEngine, work: Work) -> list[Stream]:
    """The streams of all prompts, or of none."""
    streams: list[Stream] = []
    try:
        for i, prompt in enumerate(work.prompts):
            name = work.request_id if len(work.prompts) == 1 else f"{work.request_id}-{i}"
            streams.append(await engine.submit(prompt, work.params, request_id=name, priority=work.priority))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams


@asynccontextmanager
async def _aborting(request: Request, streams: Sequence[Stream]) -> AsyncIterator[None]:
    """Ends the streams when the client is gone, and at the block's end."""

    def abort() -> None:
        for stream in streams:
            stream.abort()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        abort()
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all streams as they come. Raises the first error there is, after what the others had said by then."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    yield i, task.result()
                    waiting[asyncio.ensure_future(anext(streams[i]))] = i
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _events(
    request: Request, streams: Sequence[Stream], answer: Answer, keep_alive_s: float
) -> AsyncIterator[str]:
    """Server-sent events of an answer. An error is one of them, the last before [DONE]."""
    async with _aborting(request, streams):
        for event in answer.opening():
            yield _event(event)
        deltas = _merged(streams)
        news: asyncio.Future[tuple[int, Delta]] | None = None
        try:
            while True:
                news = news or asyncio.ensure_future(anext(deltas))
                done, _ = await asyncio.wait((news,), timeout=keep_alive_s)
                if not done:
                    yield ": keep-alive\n\n"
                    continue
                task, news = news, None
                prompt, delta = task.result()
                for event in answer.events(prompt, delta):
                    yield _event(event)
        except StopAsyncIteration:
            for event in answer.closing():
                yield _event(event)
        except InferaxError as error:
            yield _event(error_body(str(error), "server_error", None, type(error).__name__))
        finally:
            if news is not None:
                news.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration, InferaxError):
                    await news
            await deltas.aclose()  # type: ignore[attr-defined]
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _invalid(_: Request, error: Exception) -> Response:
    """A body that is not of its form."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    kind = first["type"]
    if kind == "json_invalid":
        return _error(400, f"the body is not JSON: {first['ctx']['error']}", None)
    param = path[0] if path else None
    if kind == "extra_forbidden":
        return _error(400, f"{'.'.join(path)}: it is not a field that is supported", param, "unsupported_parameter")
    return _error(400, f"{'.'.join(path) or 'the body'}: {first['msg']}", param)


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, _NoSuchModel):
        return _error(404, str(error), "model", "model_not_found")
    if isinstance(error, RequestError):
        return _error(400, str(error), error.field)
    if isinstance(error, TemplateError | UnsupportedError):
        return _error(400, str(error), "messages" if isinstance(error, TemplateError) else None)
    if isinstance(error, QueueFullError):
        return _error(429, str(error), None, "queue_full", "rate_limit_error", _RETRY)
    if isinstance(error, EngineClosedError | EngineDeadError):
        return _error(503, str(error), None, type(error).__name__, "server_error", _RETRY)
    return _error(500, str(error), None, type(error).__name__, "server_error")


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return _error(error.status_code, str(error.detail), None, None, "invalid_request_error", headers)


async def _unexpected(_: Request, error: Exception) -> Response:
    return _error(500, f"unexpected {type(error).__name__}", None, None, "server_error")


def _error(
    status: int,
    message: str,
    param: str | None,
    code: str | None = None,
    kind: str = "invalid_request_error",
    headers: dict[str, str] | None = None,
) -> Response:
    return JSONResponse(error_body(message, kind, param, code), status, headers)


class _Keys:
    """Lets a request through that has one of the keys, as `Authorization: Bearer KEY`, and any to /health."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health" and not self._known(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            refused = _error(401, "a valid API key is needed", None, "invalid_api_key", headers=headers)
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        # All keys are compared, so that time says nothing of which was near.
        return kind.lower() == b"bearer" and any([hmac.compare_digest(key, known) for known in self._keys])
