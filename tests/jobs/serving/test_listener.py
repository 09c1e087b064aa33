"""Addresses that the server listens on, and its own name for them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.servers import free_port, has_ipv6
from jobs.common.config import ConfigError
from jobs.serve import LOOPBACK_NAMES, ServeConfig, is_open
from jobs.serving.gateway import bound, close, is_loopback, netloc

ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@contextmanager
def listening(host: str) -> Iterator[int]:
    """The port on which a host's addresses are bound."""
    port = free_port()
    listeners = bound(host, port)
    yield port
    close(listeners)


def is_reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "by"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        pytest.param("::1", {"::1"}, marks=ipv6),
        pytest.param("::", {"127.0.0.1", "::1"}, marks=ipv6),
    ],
)
def test_a_host_is_reached_by_its_own_addresses(host: str, by: set[str]) -> None:
    with listening(host) as port:
        assert {address for address in ("127.0.0.1", "::1") if is_reached(address, port)} == by


@ipv6
def test_a_name_is_reached_by_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost often has two. One that the machine lacks does not matter beside another one."""
    resolve = socket.getaddrinfo

    def both(host: str, *arguments: Any, **options: Any) -> list[Any]:
        names = ("::1", "127.0.0.1", "203.0.113.1") if host == "localhost" else (host,)
        return [address for name in names for address in resolve(name, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with listening("localhost") as port:
        assert [is_reached(address, port) for address in ("127.0.0.1", "::1")] == [True, True]
        with pytest.raises(OSError, match="in use"):
            bound("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port that is half free is taken
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bound("localhost", port)
        assert not is_reached("::1", port)
    with pytest.raises(OSError, match="assign"):
        bound("203.0.113.1", 0)


def test_loopback_answers_to_its_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOCKPILOT_API_KEY", raising=False)
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.0.0.2", "0:0:0:0:0:0:0:1"):
        config = ServeConfig(host=host)
        assert {*LOOPBACK_NAMES, config.host} <= set(config.hosts)
        assert "*" not in config.hosts
        assert not is_open(config)
    for host in ("0.0.0.0", "::", "203.0.113.1", "2001:db8::1", "example.com"):
        assert ServeConfig(host=host).hosts == ("*",)
        assert is_open(ServeConfig(host=host))
        assert not is_loopback(host)
    assert ServeConfig(host="::1", allowed_hosts=("a.example",)).hosts == ("a.example",)
    assert ServeConfig(host="[::1]").host == "::1"
    assert (netloc("::1", 80), netloc("localhost", 80)) == ("[::1]:80", "localhost:80")
    with pytest.raises(ConfigError, match="host"):
        ServeConfig(host="")
