"""Several replicas of a model: conversations return to the replica that has them, and move on when it is lost."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from helpers.patience import patient
from helpers.servers import Server, configured
from jobs.serving.fields import WAITING
from jobs.serving.routing import WaitingScaling, affinity
from jobs.serving.schema import ChatRequest, CompletionRequest

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
SYSTEM = {"role": "system", "content": "Answer in short and simple words, and say so where you do not know."}
NUM_CONVERSATIONS = 8


@pytest.fixture(scope="module")
def server(tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target, draft = map(str, tiny_pair_dirs)
    config = {
        "pair": {"target": target, "draft": draft, "dtype": "float32"},
        "policy": "2",
        "resources": {"num_actors": 3, "num_cpus": 0.5},
        "num_slots": 4,
        "max_length": 800,
    }
    with configured(config, tmp_path_factory.mktemp("replicas")) as server:
        yield server


def conversation(number: int, num_turns: int) -> list[dict[str, str]]:
    turns = [
        SYSTEM,
        {"role": "user", "content": f"Conversation {number}: tell me what a block of tokens is, please."},
    ]
    for turn in range(1, num_turns):
        turns += [{"role": "assistant", "content": f"It is number {turn}."}, {"role": "user", "content": "And then?"}]
    return turns


def num_cached(client: openai.OpenAI, number: int, num_turns: int) -> tuple[int, int]:
    """Cached and all tokens of the prompt of a conversation's turn."""
    messages: Any = conversation(number, num_turns)
    usage = client.chat.completions.create(model="target", messages=messages, max_tokens=4, seed=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens


def test_turns_return_to_their_replica_and_move_on_when_it_is_lost(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=patient(60), max_retries=0)
    _, size_of_first = num_cached(client, 99, 1)
    for number in range(NUM_CONVERSATIONS):
        num_cached(client, number, 1)
    # All of the first turn but an unfinished page; the system prompt alone would be less than half of it.
    for number in range(NUM_CONVERSATIONS):
        cached, size = num_cached(client, number, 2)
        assert cached > size - 80 > size_of_first / 2
    os.kill(server.model(client.models.list().data[0].id)["pid"], signal.SIGKILL)
    for number in range(NUM_CONVERSATIONS):  # none is refused
        assert num_cached(client, number, 3)[1] > 0


def test_more_requests_than_rows_spill_over(server: Server) -> None:
    """With one key for all: the hashed replica has 4 rows, and the others help before its queue grows."""
    client = openai.OpenAI(base_url=server.url, api_key="none", timeout=patient(60), max_retries=0)
    name, messages = client.models.list().data[0].id, cast(Any, conversation(0, 1))
    same: dict[str, Any] = {"model": name, "messages": messages, "extra_body": {"prompt_cache_key": "all"}}

    def ask(seed: int) -> int:
        answer = client.chat.completions.create(**same, seed=seed, temperature=1, max_tokens=500)
        return 0 if answer.usage is None else answer.usage.completion_tokens

    busiest = dict[int, int]()  # by process
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, seed) for seed in range(12)]
        while not all(each.done() for each in asked):
            status = server.model(name)
            busiest[status["pid"]] = max(status["num_in_flight"], busiest.get(status["pid"], 0))
    assert all(each.result() > 0 for each in asked)
    assert sum(num > 0 for num in busiest.values()) > 1
    assert max(busiest.values()) < 9


@pytest.mark.parametrize("is_chat", [True, False])
def test_affinity_is_that_of_the_beginning(*, is_chat: bool) -> None:
    def chat(number: int, num_turns: int, **more: Any) -> ChatRequest:
        return ChatRequest.model_validate({"model": "m", "messages": conversation(number, num_turns), **more})

    def completion(number: int, num_turns: int, **more: Any) -> CompletionRequest:
        prompt = f"{number} " * 600 + "more" * num_turns
        return CompletionRequest.model_validate({"model": "m", "prompt": prompt, **more})

    of = chat if is_chat else completion
    assert affinity(of(0, 1)) == affinity(of(0, 3))
    assert affinity(of(0, 1)) != affinity(of(1, 1))
    assert affinity(of(0, 1)) != affinity(of(0, 1, cache_salt="mine"))
    assert affinity(of(0, 1, prompt_cache_key="a")) == affinity(of(1, 1, prompt_cache_key="a"))
    assert affinity(of(0, 1, prompt_cache_key="a")) != affinity(of(0, 1, prompt_cache_key="b"))


@pytest.mark.parametrize(
    ("num", "num_requests", "waiting_s", "desired"),
    [
        (1, 4, 0.0, 1),
        (1, 5, 0.0, 2),  # more requests than rows
        (1, 4, 2.5, 2),  # too slow, though there are rows
        (2, 2, 2.5, 3),
        (3, 5, 0.0, 2),
        (3, 7, 0.0, 3),  # two replicas would be nearly full
        (3, 2, 1.5, 3),  # still slow
        (3, 0, 0.0, 0),  # Serve keeps the least number
    ],
)
def test_scaling_follows_what_users_feel(num: int, num_requests: int, waiting_s: float, desired: int) -> None:
    context: Any = SimpleNamespace(
        current_num_replicas=num,
        total_num_requests=num_requests,
        aggregated_metrics={WAITING: {"a": 0.0, "b": waiting_s}},
    )
    assert WaitingScaling(num_slots=4, target_s=2.0)(context) == (desired, {})
