"""Many clients at once against an endpoint: what they wait for, and whether every answer comes whole."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LONGEST_S = 300.0


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What the clients saw; times in seconds.

    Attributes:
        completed: Answers that came whole.
        refused: Answers 429; the client waits and asks again.
        errors: What went wrong otherwise, with how often.
        tokens: New tokens of whole answers.
        seconds: From the first request to the last answer.
        first_s: From each request to its first token.
        between_s: Mean time between tokens of each answer.
        whole_s: From each request to its end.
    """

    completed: int = 0
    refused: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Counts, tokens per second and percentiles."""
        return {
            "completed": self.completed,
            "refused": self.refused,
            "errors": dict(self.errors),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
            "first_token_s": percentiles(self.first_s),
            "between_tokens_s": percentiles(self.between_s),
            "whole_s": percentiles(self.whole_s),
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th, 95th and 99th percentile (nearest rank), or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99)}


def load_test(
    host: str,
    port: int,
    *,
    clients: int = 64,
    seconds: float = 30.0,
    prompt_tokens: tuple[int, int] = (16, 64),
    new_tokens: tuple[int, int] = (8, 32),
    vocabulary: int = 1000,
    seed: int = 0,
) -> LoadResult:
    """Ask an endpoint for streamed completions of random tokens, each client one after another.

    Args:
        host: Address of the server.
        port: Its port.
        clients: How many ask at once.
        seconds: No request begins later; those under way are waited for.
        prompt_tokens: Least and most tokens of a prompt.
        new_tokens: Least and most new tokens.
        vocabulary: Token numbers are below.
        seed: Of the random numbers.
    """
    result = LoadResult()

    async def client(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        while time.perf_counter() < end:
            prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(*prompt_tokens))]
            body = {"prompt": prompt, "max_tokens": draw.randint(*new_tokens), "temperature": 0, "stream": True}
            body["stream_options"] = {"include_usage": True}
            try:
                await asyncio.wait_for(_ask(host, port, body, result), _LONGEST_S)
            except (TimeoutError, OSError, ValueError, EOFError) as failure:
                name = f"{type(failure).__name__}: {failure}"[:200]
                result.errors[name] = result.errors.get(name, 0) + 1
                await asyncio.sleep(0.1)

    async def all_clients() -> None:
        await asyncio.gather(*(client(number) for number in range(clients)))

    began = time.perf_counter()
    end = began + seconds
    asyncio.run(all_clients())
    result.seconds = time.perf_counter() - began
    return result


async def _ask(host: str, port: int, body: Mapping[str, Any], result: LoadResult) -> None:
    """One streamed completion; its figures join the result if it comes whole.

    Raises:
        ValueError: The server answered with an error.
        EOFError: The stream ended early.
    """
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        if status == 429:
            result.refused += 1
            await asyncio.sleep(0.1)
            return
        first = usage = None
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(f"the stream says: {event['error']['message']}")
            first = first or time.perf_counter()
            usage = event.get("usage") or usage
        else:
            raise EOFError(f"the stream ended early (status {status})")
        ended = time.perf_counter()
        if usage is None or first is None:
            raise ValueError("the answer has no usage")
        count = usage["completion_tokens"]
        result.completed += 1
        result.tokens += count
        result.first_s.append(first - began)
        result.whole_s.append(ended - began)
        if count > 1:
            result.between_s.append((ended - first) / (count - 1))
    finally:
        writer.close()
