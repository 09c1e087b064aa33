"""Clients of a server: API keys, stored as digests, and fair shares of queue and capacity."""

import hashlib
import hmac
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fastapi import Request as HttpRequest

from jobs.serving.fields import ApiError


def environment_key() -> str | None:
    """The key in BLOCKPILOT_API_KEY; None if it is not set."""
    return os.environ.get("BLOCKPILOT_API_KEY", "").strip() or None


@dataclass(frozen=True)
class ApiKeys:
    """SHA-256 digests of the accepted keys; without keys all requests are accepted."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: tuple[str, ...]) -> "ApiKeys":
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def admit(self, http: HttpRequest) -> bool:
        """True if a request has an accepted key, or none is required; compares in constant time."""
        key_digest = hashlib.sha256(_key(http).encode()).digest()
        accepted = any(hmac.compare_digest(key_digest, digest) for digest in self.digests)
        return not self.digests or accepted

    def client(self, http: HttpRequest) -> str:
        """Name of the client by its key; "" unless there are several keys."""
        if len(self.digests) < 2:
            return ""
        return hashlib.sha256(_key(http).encode()).hexdigest()[:12]

    def check(self, http: HttpRequest) -> None:
        """Raise ApiError 401 for a request that is not admitted."""
        if not self.admit(http):
            key = http.headers.get("authorization", "").partition(" ")[2]
            message = "unknown API key" if key else "an API key is needed: 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")


NO_KEYS = ApiKeys()


def _key(http: HttpRequest) -> str:
    """The key of a request; "" if it has none."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def api_keys(file: Path | None) -> ApiKeys:
    """Keys of a file, one per line; without a file, of the environment. Raises ValueError for a file without keys."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines() if file else [environment_key() or ""]
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file {file}: not UTF-8 ({error})") from None
    keys = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))  # a client is a key
    if file and not keys:
        raise ValueError(f"api_key_file {file}: has no key; one per line is needed")
    return ApiKeys.of(keys)


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queue with round robin over clients by name, first in, first out for each client."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, deque[T]] = OrderedDict()  # the next client first; no empty queues

    def __len__(self) -> int:
        return sum(map(len, tuple(self._by_client.values())))  # a copy, since other threads call this

    def put(self, client: str, item: T) -> None:
        self._by_client.setdefault(client, deque()).append(item)

    def remove(self, client: str, is_removed: Callable[[T], bool]) -> None:
        """Remove items of a client."""
        kept = deque(item for item in self._by_client.get(client, ()) if not is_removed(item))
        if kept:
            self._by_client[client] = kept
        else:
            self._by_client.pop(client, None)

    def take(self) -> T:
        """The next item of the next client, which moves to the end; raises KeyError if the queue is empty."""
        client, items = self._by_client.popitem(last=False)
        item = items.popleft()
        if items:
            self._by_client[client] = items
        return item


def has_room(num_held: int, num_asked: int, num_free: int, *, alone: bool) -> bool:
    """True if a client with `num_held` requests may have `num_asked` more while there is capacity for `num_free`.

    With several clients, each may have as many requests as it leaves capacity for, and at least one (dynamic
    thresholds, Choudhury and Hahne 1998): at most half of the capacity, less with more clients. alone: up to all.
    """
    num_left = num_free - num_asked
    return num_left >= 0 and (alone or num_held + num_asked <= max(num_left, 1))


def most_of_client(capacity: int, *, alone: bool) -> int:
    """Maximum requests that a client may ever have (`has_room`), while no other client has any."""
    return capacity if alone else max(capacity // 2, 1)
