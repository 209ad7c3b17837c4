"""Requests and answers in the form of OpenAI's API: what is read from a body, and what is written back.

Completions and chat completions differ in where the prompt stands and in how a choice looks; all else is shared.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.serving.tokens import Tokenizer

_DEFAULT_NEW_TOKENS = {False: 16, True: 512}
"""By whether it is a chat; a chat may ask for more."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,), "suffix": ("",),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "tools": ([],), "functions": ([],),
    "response_format": ({"type": "text"},),
}  # fmt: skip
"""Parameters that are not carried out, with the values that ask for nothing."""


class BadRequest(UnsupportedError):  # noqa: N818 -- it is what HTTP calls it
    """A body that cannot be served; ``parameter`` names what is wrong."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checked body."""

    chat: bool
    model: str | None
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool

    def most_new_tokens(self, prompt: Sequence[int], context: int) -> int:
        """New tokens of a prompt: those asked for, else some, as far as the context goes."""
        if self.new_tokens is not None:
            return self.new_tokens
        return max(1, min(_DEFAULT_NEW_TOKENS[self.chat], context - len(prompt)))


def read_ask(body: Any, tokenizer: Tokenizer | None, *, chat: bool) -> Ask:
    """Check a body and turn its prompts into tokens.

    Raises:
        BadRequest: Something in it is wrong or not supported.
        UnsupportedError: The model's chat template refuses the messages.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name} is {value!r}, but this server supports {neutral[0]!r} only; leave it out", name)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return Ask(
        chat=chat,
        model=_typed(body, "model", str, "a text"),
        prompts=_chat_prompt(body, tokenizer) if chat else _prompts(body.get("prompt"), tokenizer),
        new_tokens=_number(body, limit, None, 1, None, whole=True),
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 1e-6, 1.0),
        seed=_number(body, "seed", None, None, None, whole=True),
        stops=_stops(body.get("stop"), tokenizer),
        stream=bool(_typed(body, "stream", bool, "true or false")),
        usage=bool(options.get("include_usage", False)),
    )


def _typed(body: Mapping[str, Any], name: str, kind: type, described: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"{name} is {value!r}, but it must be {described}", name)
    return value


def _number(
    body: Mapping[str, Any],
    name: str,
    default: float | None,
    least: float | None,
    most: float | None,
    *,
    whole: bool = False,
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    if not fits or (least is not None and not value >= least) or (most is not None and not value <= most):
        limits = [text for text in (
            None if least is None else f"at least {least:g}", None if most is None else f"at most {most:g}",
        ) if text]  # fmt: skip
        described = " ".join(["a whole number" if whole else "a number", " and ".join(limits)]).strip()
        raise BadRequest(f"{name} is {value!r}, but it must be {described}", name)
    return value


def _stops(value: Any, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadRequest(f"stop is {value!r}, but it must be a text or a list of texts", "stop")
    if stops and tokenizer is None:
        raise BadRequest("stop needs a tokenizer, and the model's folder has none", "stop")
    return tuple(stops)


def _prompts(value: Any, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    entries = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    prompts = []
    for entry in entries:
        if isinstance(entry, str):
            if tokenizer is None:
                raise BadRequest("the model's folder has no tokenizer; give the prompt as token numbers", "prompt")
            entry = tokenizer.encode(entry)
        if not isinstance(entry, list) or not entry or not all(type(token) is int for token in entry):
            raise BadRequest(
                "prompt must be a text that is not empty, a list of token numbers, or a list of such prompts", "prompt"
            )
        prompts.append(tuple(entry))
    return tuple(prompts)


def _chat_prompt(body: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty", "messages")
    plain = []
    for k, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise BadRequest(f"messages[{k}] must be an object with role and content", "messages")
        plain.append({"role": role, "content": _content(message.get("content"), k)})
    if tokenizer is None:
        raise BadRequest("the model's folder has no tokenizer, so there is no chat; use /v1/completions", "messages")
    return (tuple(tokenizer.encode_chat(plain)),)


def _content(content: Any, k: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise BadRequest(f"the content of messages[{k}] must be a text; images and sounds are not supported", "messages")


class Answer:
    """Makes the JSON of one answer."""

    def __init__(self, ask: Ask, model: str) -> None:
        self._chat = ask.chat
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if ask.chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Mapping[str, int]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices: list[dict[str, Any]] = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": index, "finish_reason": reason, "logprobs": None, **content})
        return {**self._head, "choices": choices, "usage": dict(usage)}

    def part(self, index: int, text: str, reason: str | None, *, begins: bool = False) -> dict[str, Any]:
        """A part of a streamed answer."""
        if self._chat:
            delta = {"role": "assistant", "content": text} if begins else {"content": text} if text else {}
            content: dict[str, Any] = {"delta": delta}
        else:
            content = {"text": text}
        return self._chunk([{"index": index, "finish_reason": reason, "logprobs": None, **content}])

    def usage(self, usage: Mapping[str, int]) -> dict[str, Any]:
        """The last part of a streamed answer, where the client asks for it."""
        return {**self._chunk([]), "usage": dict(usage)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        return {**self._head, **kind, "choices": choices}


def error_body(message: str, kind: str, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}
