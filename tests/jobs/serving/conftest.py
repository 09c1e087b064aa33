"""A replica of the tiny pair, which all tests of a worker share, and a client that leaves nothing in its engine."""

from collections.abc import Iterator
from functools import partial

import pytest

from blockpilot.pairs.loading import Pair
from helpers.api import ApiClient, HttpCall, Send, client_of, event_loop, replica_of
from jobs.serving.replica import Replica


@pytest.fixture(scope="session", autouse=True)
def prices_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Step costs of tests are not those of the user's servers."""
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
    """Sends a request to an app: `send(app, body, ...)`, as HttpCall, and returns at once."""
    with event_loop() as loop:
        yield partial(HttpCall, loop)
