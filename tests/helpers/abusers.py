"""Abusive clients: endless bodies, unread answers, disconnects, hostile grammars, absurd parameters, junk."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

READER_S, ANSWER_S = 15.0, 70.0  # stay of a slow reader, timeout of every abuse
LEAVE_S = 1.0  # longest stay of a client that disconnects early
NUM_AT_ONCE = 140  # connections of a flood: more than a gateway accepts
GRAMMARS = {
    "ambiguous": 'start: e "!"\ne: e e | "a" | "b"',
    "wrong": "start: nowhere",
    "deep": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(5000)) + 'a5000: "z"',
    "repeated": 'start: ("a"{0,1000}){0,1000}',
    "stalling": '{"allOf": [{"type": "integer", "multipleOf": 97}, {"type": "integer", "multipleOf": 101},'
    ' {"type": "integer", "multipleOf": 103}, {"type": "integer", "multipleOf": 107}]}',
}
FIELDS = (
    *("temperature", "top_p", "top_k", "max_tokens", "n", "seed", "logprobs", "stop", "block_size", "layout"),
    *("prompt", "model", "stream", "stream_options", "timeout_s", "presence_penalty", "lookup", "unknown"),
)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 1e-50, 1e-40, 1e300, 10**30, -(10**30), math.nan, math.inf, 0.5, 2**63, True, None),
    *("", "auto", "x" * 5000, "\x00", "<|im_start|>", ["\ud800"]),
    *([], [[]], {}, {"a": {"b": []}}, [1, 2, 3], [10**9], [-1]),
)


class Abuser:
    """A malicious client with one key and one model."""

    def __init__(self, port: int, key: str, model: str, seed: int) -> None:
        self._port, self._key, self._model, self._dice = port, key, model, random.Random(seed)
        self._kinds: tuple[Callable[[], Awaitable[str]], ...] = (
            self._slow_body, self._slow_bodies, self._slow_reader, self._slow_readers, self._leave, self._grammar,
            self._grammar, self._absurd, self._absurd, self._oversized, self._junk, self._endless_head,
        )  # fmt: skip

    async def abuse(self) -> str:
        """Run a random kind of abuse; returns its name and the status of the answer."""
        kind = self._dice.choice(self._kinds)
        return f"{kind.__name__.strip('_').replace('_', ' ')}: {await _outcome(kind())}"

    async def _slow_body(self) -> str:
        """A body that is announced but never completed."""
        async with self._connection() as (reader, writer):
            writer.write(self._head(1000) + b'{"model": ')
            return _status(await reader.readline())

    async def _slow_reader(self) -> str:
        """A long answer with log probabilities, of which only the first line is read."""
        body = {"prompt": "Once", "max_tokens": 400, "logprobs": 5, "n": 4, "stream": True, "temperature": 1}
        async with self._connection() as (reader, writer):
            writer.write(self._request(body))
            status = _status(await reader.readline())
            await asyncio.sleep(READER_S)
            return status

    async def _slow_bodies(self) -> str:
        """More concurrent slow bodies than the server accepts."""
        return await _together([self._slow_body() for _ in range(NUM_AT_ONCE)])

    async def _slow_readers(self) -> str:
        return await _together([self._slow_reader() for _ in range(NUM_AT_ONCE // 4)])

    async def _grammar(self) -> str:
        """A grammar that stalls, is invalid, or grows with the text; a new one each time, so that none is cached."""
        kind = self._dice.choice(list(GRAMMARS))
        field = "json" if kind == "stalling" else "grammar"
        grammar = GRAMMARS[kind] + " " * self._dice.randint(0, 1000)
        body = {"prompt": "a", "max_tokens": 200, "structured_outputs": {field: grammar}}
        async with self._connection() as (reader, writer):
            writer.write(self._request(body))
            return f"{kind} {_status(await reader.readline())}"

    async def _endless_head(self) -> str:
        async with self._connection() as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 2**18)
            return _status(await reader.readline())

    async def _leave(self) -> str:
        """A client that disconnects before its answer ends."""
        async with self._connection() as (_, writer):
            writer.write(self._request({"prompt": "Once", "max_tokens": 200, "stream": self._dice.random() < 0.5}))
            await asyncio.sleep(LEAVE_S * self._dice.random())
            return "left"

    async def _absurd(self) -> str:
        """Random parameters, most of them invalid."""
        body: dict[str, Any] = {"prompt": "Once", "max_tokens": 4}
        for _ in range(self._dice.randint(1, 4)):
            body[self._dice.choice(FIELDS)] = self._dice.choice(VALUES)
        async with self._connection() as (reader, writer):
            writer.write(self._request(body))
            return _status(await reader.readline())

    async def _oversized(self) -> str:
        """A prompt of two MiB."""
        async with self._connection() as (reader, writer):
            writer.write(self._request({"prompt": "x" * 2**21}))
            return _status(await reader.readline())

    async def _junk(self) -> str:
        """Random bytes in place of HTTP, or of a JSON body."""
        async with self._connection() as (reader, writer):
            junk = self._dice.randbytes(self._dice.randint(1, 2000))
            writer.write(junk if self._dice.random() < 0.5 else self._head(len(junk)) + junk)
            return _status(await reader.readline())

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**14)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def _request(self, body: Mapping[str, Any]) -> bytes:
        content = json.dumps({"model": self._model} | dict(body)).encode()
        return self._head(len(content)) + content

    def _head(self, length: int) -> bytes:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


async def _outcome(abuse: Awaitable[str]) -> str:
    """Outcome of an abuse, or the name of its connection error."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await abuse
    except OSError as error:  # or TimeoutError, a subclass
        return type(error).__name__


async def _together(abuses: Sequence[Awaitable[str]]) -> str:
    """Distinct outcomes of several concurrent abuses."""
    return ", ".join(sorted(set(await asyncio.gather(*map(_outcome, abuses)))))


def _status(line: bytes) -> str:
    """Status of a response's first line; "closed" if the connection was closed."""
    return line.split()[1].decode(errors="replace") if line.startswith(b"HTTP/") else "closed"
