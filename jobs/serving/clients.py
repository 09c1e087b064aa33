"""Clients of a server: their API keys, of which only digests are kept, and fair shares of queues and places."""

import hashlib
import hmac
import os
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fastapi import Request as HttpRequest

from jobs.serving.fields import ApiError


def environment_key() -> str | None:
    """The key in BLOCKPILOT_API_KEY; None where there is none."""
    return os.environ.get("BLOCKPILOT_API_KEY", "").strip() or None


@dataclass(frozen=True)
class ApiKeys:
    """SHA-256 digests of the accepted keys; without any key, all requests are accepted."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: tuple[str, ...]) -> "ApiKeys":
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def admit(self, http: HttpRequest) -> bool:
        """True if a request brings an accepted key, or none is needed; compares in constant time."""
        given = hashlib.sha256(_key(http).encode()).digest()
        known = any(hmac.compare_digest(given, digest) for digest in self.digests)
        return not self.digests or known

    def client(self, http: HttpRequest) -> str:
        """Name of who brings an accepted key; "" where there are not several."""
        if len(self.digests) < 2:
            return ""
        return hashlib.sha256(_key(http).encode()).hexdigest()[:12]

    def check(self, http: HttpRequest) -> None:
        """Raise ApiError 401 for a request that is not admitted."""
        if not self.admit(http):
            given = http.headers.get("authorization", "").partition(" ")[2]
            message = "unknown API key" if given else "an API key is needed: 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")


NO_KEYS = ApiKeys()


def _key(http: HttpRequest) -> str:
    """The key that a request brings; "" for none."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def api_keys(file: Path | None) -> ApiKeys:
    """The keys of a file, one a line, else of the environment; ValueError for a file without any."""
    lines = file.read_text().splitlines() if file else [environment_key() or ""]
    keys = tuple(line.strip() for line in lines if line.strip())
    if file and not keys:
        raise ValueError(f"api_key_file {file}: has no key; one a line is needed")
    return ApiKeys.of(keys)


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin over clients by name; a client's own items come first in, first out."""

    def __init__(self) -> None:
        self._of_client: OrderedDict[str, deque[T]] = OrderedDict()  # the next client first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._of_client.values()))

    def put(self, client: str, item: T) -> None:
        self._of_client.setdefault(client, deque()).append(item)

    def take(self) -> T:
        """The next item of the next client, who then is the last; raises KeyError where there is none."""
        client, items = self._of_client.popitem(last=False)
        item = items.popleft()
        if items:
            self._of_client[client] = items
        return item


def has_room(num_held: int, num_asked: int, num_free: int, *, alone: bool) -> bool:
    """True if a client that holds `num_held` places gets `num_asked` more of those that are free.

    One of several may hold no more than it leaves free, the last place apart (dynamic thresholds, Choudhury and Hahne
    1998): it never has more than half, and the fewer the more others there are. One that is alone may have all.
    """
    left = num_free - num_asked
    return left >= 0 and (alone or num_held + num_asked <= max(left, 1))
