"""Load generator for an OpenAI-compatible server: streamed chats in a closed or an open loop, with arrival times.

In a closed loop every client sends its next request after the previous answer. In an open loop requests arrive by a
Poisson process, independent of the answers. A refused request (429) is repeated in a closed loop, and lost in an open
one.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

CONNECT_S, ANSWER_S = 10.0, 600.0


@dataclass
class Received:
    """Result of one request; times are in seconds of the same clock. Status 0: the connection failed."""

    sent: float
    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    """Arrival times of the pieces of text."""
    num_tokens: int = 0
    text: str = ""
    acceptance_length: float | None = None
    error: str = ""
    """Reason why the answer is incomplete."""
    retry_after_s: float = 1.0
    """Retry-After of a refusal."""

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def token_s(self) -> float:
        """Seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between pieces of text."""
        return [after - before for before, after in pairwise(self.arrivals)]


class Clients:
    """HTTP clients that send /v1/chat/completions bodies to `url` (which ends in /v1)."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)
        self._url, self._dice = url, random.Random(0)

    async def __aenter__(self) -> "Clients":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """Id of the server's first model; raises ValueError if it lists none."""
        try:
            return str((await self._http.get("models")).json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self._url}: no server that lists its models ({reason})") from None

    async def closed_loop(self, bodies: Sequence[Mapping[str, Any]], num_clients: int) -> list[Received]:
        """Send all bodies, `num_clients` at a time; repeat refused ones after the server's Retry-After."""
        waiting, received = iter(bodies), list[Received]()

        async def client() -> None:
            for body in waiting:
                while True:
                    answer = await self.send(body)
                    received.append(answer)
                    if answer.status != 429:
                        break
                    await asyncio.sleep(answer.retry_after_s)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return received

    async def open_loop(self, bodies: Sequence[Mapping[str, Any]], rate: float) -> list[Received]:
        """Send all bodies, on average `rate` per second."""
        tasks = []
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                tasks.append(group.create_task(self.send(body)))
                await asyncio.sleep(self._dice.expovariate(rate))
        return [task.result() for task in tasks]

    async def send(self, body: Mapping[str, Any]) -> Received:
        """Send one request, and read its answer to the end."""
        received = Received(time.perf_counter())
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "chat/completions", json=request) as response:
                received.status = response.status_code
                if response.status_code == 200:
                    await self._read(response, received)
                else:
                    received.error = (await response.aread()).decode(errors="replace")[:500]
                    received.retry_after_s = float(response.headers.get("retry-after", received.retry_after_s))
        except httpx.HTTPError as error:
            received.error = f"{type(error).__name__}: {error}"
        return received

    async def _read(self, response: httpx.Response, received: Received) -> None:
        ended = False
        async for event in _events(response):
            if event is None:
                ended = True
            elif "error" in event:
                received.error = event["error"]["message"]
            elif event["choices"]:
                if content := event["choices"][0]["delta"].get("content"):
                    received.text += content
                    received.arrivals.append(time.perf_counter())
            else:
                usage = event["usage"]
                received.num_tokens = usage["completion_tokens"]
                received.acceptance_length = usage.get("acceptance_length")
        if not ended and not received.error:
            received.error = "the stream was cut"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Objects of a stream; None at its regular end."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)
