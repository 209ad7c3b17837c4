"""An HTTP server that OpenAI's clients talk to: completions and chat, streamed or whole, with health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import NotInstalledError, ProblemError, QSyncError, reason_of
from qsync_opt.runtimes.torch.serving.engine import Engine, FullError, Request, Update
from qsync_opt.runtimes.torch.serving.protocol import Answer, Ask, BadRequest, error_body, read_ask
from qsync_opt.runtimes.torch.serving.tokens import TextStream, Tokenizer
from qsync_opt.runtimes.torch.serving.workers import StageError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_LARGEST_BODY = 16 << 20
_SHUTDOWN_S = 10


class _ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class _Failed(Exception):  # noqa: N818 -- it carries the reason to where the answer is written
    """The stages failed while a request ran."""


class _Session:
    """The engine's requests of one HTTP request, and what they answer."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, ask: Ask) -> None:
        self._engine = engine
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._streams = [TextStream(tokenizer, ask.stops) for _ in ask.prompts]
        self.requests = [
            Request(
                prompt=prompt,
                new_tokens=ask.most_new_tokens(prompt, engine.limits.context),
                listener=self._listener(index),
                temperature=ask.temperature,
                top_p=ask.top_p,
                seed=ask.seed if ask.seed is None else ask.seed + index,
                ends=tokenizer.end_tokens if tokenizer is not None else (),
            )
            for index, prompt in enumerate(ask.prompts)
        ]

    def _listener(self, index: int) -> Callable[[Update], None]:
        def hear(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                self._loop.call_soon_threadsafe(self._updates.put_nowait, (index, update))

        return hear

    def submit(self) -> None:
        """Submit all or none."""
        for request in self.requests:  # what can never be served is refused before anything runs
            self._engine.check(request.prompt, request.new_tokens)
        try:
            for request in self.requests:
                self._engine.submit(request)
        except QSyncError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Stop what still runs."""
        for request in self.requests:
            self._engine.cancel(request)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of prompts and answers."""
        prompt, new = sum(len(r.prompt) for r in self.requests), sum(len(r.tokens) for r in self.requests)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    async def texts(self, receive: Receive) -> AsyncGenerator[tuple[int, str, str | None]]:
        """Index, text and, at the end, reason, as they come.

        Raises:
            _ClientGoneError: The client has closed the connection.
            _Failed: The stages have failed.
        """
        gone = asyncio.create_task(_until_gone(receive))
        left = set(range(len(self.requests)))
        try:
            while left:
                index, update = await self._next(gone)
                if index not in left:
                    continue  # it was stopped by a text
                if update.error is not None:
                    raise _Failed(update.error)
                stream = self._streams[index]
                if update.token is None:
                    left.discard(index)
                    yield index, stream.finish(), update.finish
                    continue
                text = stream.push(update.token)
                if stream.stopped:
                    left.discard(index)
                    self._engine.cancel(self.requests[index])
                    yield index, text, "stop"
                elif text:
                    yield index, text, None
        finally:
            gone.cancel()
            self.cancel()

    async def _next(self, gone: asyncio.Task[None]) -> tuple[int, Update]:
        update = asyncio.create_task(self._updates.get())
        await asyncio.wait({update, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not update.done():
            update.cancel()
            raise _ClientGoneError
        return update.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream:
    """A response of server-sent events that ends its requests when the client goes."""

    def __init__(self, session: _Session, answer: Answer, ask: Ask) -> None:
        self._session, self._answer, self._ask = session, answer, ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        begun: set[int] = set()
        try:
            async with contextlib.aclosing(self._session.texts(receive)) as texts:
                async for index, text, reason in texts:
                    await event(self._answer.part(index, text, reason, begins=index not in begun))
                    begun.add(index)
            if self._ask.usage:
                await event(self._answer.usage(self._session.usage))
            await event("[DONE]")
        except _ClientGoneError:
            return
        except _Failed as failure:
            await event(error_body(str(failure), "server_error", code="stage_failed"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def make_app(engine: Engine, tokenizer: Tokenizer | None, model: str) -> Starlette:
    """The application: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health``, ``/metrics``.

    Args:
        engine: Runs the requests; who made it closes it.
        tokenizer: Of the model; None: prompts and answers are token numbers.
        model: The name that requests use.

    Raises:
        NotInstalledError: starlette is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.routing import Route
    except ModuleNotFoundError as missing:
        raise _not_installed() from missing

    def refuse(status: int, message: str, kind: str, parameter: str | None = None, code: str | None = None) -> Response:
        headers = {"retry-after": "1"} if status == 429 else None
        return JSONResponse(error_body(message, kind, parameter, code), status, headers)

    async def answer(http: HttpRequest, *, chat: bool) -> Any:
        try:
            body = await _body(http)
            # Tokenizing a long text takes a while.
            ask = await asyncio.to_thread(lambda: read_ask(_json(body), tokenizer, chat=chat))
            if ask.model not in (None, model):
                message = f"there is no model {ask.model!r}; this server has {model!r}"
                return refuse(404, message, "invalid_request_error", "model", "model_not_found")
            session = _Session(engine, tokenizer, ask)
            session.submit()
        except BadRequest as bad:
            return refuse(400, str(bad), "invalid_request_error", bad.parameter)
        except FullError as full:
            return refuse(429, str(full), "rate_limit_error", code="rate_limit_exceeded")
        except StageError as failure:
            return refuse(503, str(failure), "server_error", code="stage_failed")
        except ProblemError as problem:
            return refuse(400, str(problem), "invalid_request_error", code="context_length_exceeded")
        except QSyncError as failure:
            return refuse(400, str(failure), "invalid_request_error")
        form = Answer(ask, model)
        if ask.stream:
            return _EventStream(session, form, ask)
        texts, reasons = [""] * len(ask.prompts), ["length"] * len(ask.prompts)
        try:
            async with contextlib.aclosing(session.texts(http.receive)) as parts:
                async for index, text, reason in parts:
                    texts[index] += text
                    reasons[index] = reason or reasons[index]
        except _ClientGoneError:
            return PlainTextResponse("", 499)  # nobody reads it
        except _Failed as failure:
            return refuse(503, str(failure), "server_error", code="stage_failed")
        return JSONResponse(form.whole(texts, reasons, session.usage))

    async def completions(http: HttpRequest) -> Any:
        return await answer(http, chat=False)

    async def chat(http: HttpRequest) -> Any:
        return await answer(http, chat=True)

    async def models(http: HttpRequest) -> Response:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "qsync-opt"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(http: HttpRequest) -> Response:
        data = {
            "status": "ok" if engine.failure is None else "failed",
            "reason": engine.failure,
            "running": engine.running,
            "waiting": engine.waiting,
            "context": engine.limits.context,
        }
        return JSONResponse(data, 200 if engine.failure is None else 503)

    async def metrics(http: HttpRequest) -> Response:
        return PlainTextResponse(metrics_text(engine), media_type="text/plain; version=0.0.4")

    def post(path: str, endpoint: Callable[[HttpRequest], Awaitable[Any]]) -> Route:
        return Route(path, endpoint, methods=["POST"])

    return Starlette(
        routes=[
            post("/v1/completions", completions),
            post("/v1/chat/completions", chat),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ]
    )


async def _body(http: HttpRequest) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > _LARGEST_BODY:
            raise BadRequest(f"the body has more than {_LARGEST_BODY} bytes")
    return bytes(body)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as failure:
        raise BadRequest(f"the body is no JSON ({failure})") from failure


def metrics_text(engine: Engine) -> str:
    """Counters and gauges in the text form of Prometheus."""
    counts = engine.counts
    lines = []

    def metric(name: str, kind: str, help: str, values: Sequence[tuple[str, float]]) -> None:
        lines.append(f"# HELP qsync_serving_{name} {help}")
        lines.append(f"# TYPE qsync_serving_{name} {kind}")
        lines.extend(f"qsync_serving_{name}{labels} {value:g}" for labels, value in values)

    ends = ("stop", "length", "cancelled", "failed")
    metric("up", "gauge", "1 while the stages run.", [("", float(engine.failure is None))])
    finished = [(f'{{reason="{reason}"}}', float(counts.finished[reason])) for reason in ends]
    metric("requests_total", "counter", "Requests that have ended, by reason.", finished)
    metric("refused_total", "counter", "Requests refused because the queue was full.", [("", counts.refused)])
    metric("requests_running", "gauge", "Requests that run.", [("", engine.running)])
    metric("requests_waiting", "gauge", "Requests that wait.", [("", engine.waiting)])
    metric("cache_pages", "gauge", "Pages of the caches.", [("", engine.pages)])
    metric("cache_pages_used", "gauge", "Pages that requests hold.", [("", engine.pages_used)])
    metric("prompt_tokens_total", "counter", "Prompt tokens that were prefilled.", [("", counts.prompt_tokens)])
    metric("new_tokens_total", "counter", "Tokens that were generated.", [("", counts.new_tokens)])
    drafted, accepted = sum(counts.drafted), sum(counts.accepted)
    metric("spec_decode_num_drafts_total", "counter", "Drafts of a sequence that were judged.", [("", counts.drafts)])
    metric("spec_decode_num_draft_tokens_total", "counter", "Tokens that were drafted.", [("", drafted)])
    metric("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that were accepted.", [("", accepted)])
    for name, values, help in (
        ("draft", counts.drafted, "Tokens that were drafted, by position in the draft."),
        ("accepted", counts.accepted, "Drafted tokens that were accepted, by position in the draft."),
    ):
        places = [(f'{{position="{k}"}}', float(value)) for k, value in enumerate(values) if counts.drafted[k]]
        metric(f"spec_decode_num_{name}_tokens_per_pos_total", "counter", help, places)
    passes = [('{phase="prefill"}', counts.prefill_passes), ('{phase="decode"}', counts.decode_passes)]
    metric("passes_total", "counter", "Passes through the stages.", passes)
    first = [("_sum", counts.first_token_s), ("_count", counts.first_tokens)]
    metric("first_token_seconds", "summary", "From a request to its first token.", first)
    return "\n".join(lines) + "\n"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port is known to be free before a model is loaded; port 0: any.

    Raises:
        ProblemError: The port is taken, or the address is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as failure:
        listening.close()
        reason = reason_of(failure) if isinstance(failure, OSError) else str(failure)
        raise ProblemError(
            f"cannot listen on {host} port {port}: {reason}; end what uses it, or choose another by --port"
        ) from failure
    return listening


def serve(app: Starlette, engine: Engine, listening: socket.socket) -> None:
    """Serve until Ctrl-C, or until the stages fail.

    Raises:
        StageError: The stages failed; every request has been answered with that.
        NotInstalledError: uvicorn is missing.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as missing:
        raise _not_installed() from missing
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=_SHUTDOWN_S
    )
    server = uvicorn.Server(config)

    def end(reason: str) -> None:
        server.should_exit = True

    engine.on_failure = end
    if engine.failure is None:
        server.run(sockets=[listening])
    if engine.failure is not None:
        raise StageError(engine.failure)


def serve_quietly(app: Starlette, engine: Engine, listening: socket.socket) -> None:
    """`serve` for a thread beside its clients, who hear of failures themselves."""
    with contextlib.suppress(StageError):
        serve(app, engine, listening)


def _not_installed() -> NotInstalledError:
    return NotInstalledError("the server needs starlette and uvicorn: pip install 'qsync-opt[serving]'")
