"""Replica of the tiny pair, shared by all tests of a pytest worker, and a client that leaves no request in it."""

from collections.abc import Iterator
from functools import partial

import pytest

from blockpilot.pairs.loading import Pair
from helpers.api import ApiClient, HttpCall, Send, client_of, event_loop, replica_of
from jobs.serving.replica import Replica


@pytest.fixture(scope="session", autouse=True)
def prices_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Separate folder of step costs, so that tests do not use those of the user's servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.common.prices.FOLDER", tmp_path_factory.mktemp("prices"))
        yield


@pytest.fixture(scope="session")
def replica(tiny_pair: Pair) -> Iterator[Replica]:
    """Tests that change a replica, or need another one, define a fixture of this name."""
    with replica_of(tiny_pair, num_slots=4, max_length=300, max_queue=8) as replica:
        yield replica


@pytest.fixture
def client(replica: Replica) -> Iterator[ApiClient]:
    with client_of(replica) as client:
        yield client


@pytest.fixture
def send() -> Iterator[Send]:
    """`send(app, body, ...)` sends a request to an app, as an HttpCall, and returns immediately."""
    with event_loop() as loop:
        yield partial(HttpCall, loop)
