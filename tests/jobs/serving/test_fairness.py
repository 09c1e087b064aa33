"""Clients with keys of their own: each has a share of the places, and slots go round."""

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.pairs.loading import Pair
from helpers.api import COMPLETIONS, LONG, HttpCall, app_of, idle, replica_of, until
from jobs.serving.clients import ApiKeys, FairQueue, has_room

KEYS = ApiKeys.of(("key-a", "key-b", "key-c"))


@given(st.lists(st.one_of(st.sampled_from("abc"), st.none()), max_size=60))
def test_clients_take_turns_and_each_keeps_its_order(events: list[str | None]) -> None:
    """A letter: that client puts its next item; None: one is taken."""
    queue, waiting, last_turn = FairQueue[tuple[str, int]](), {name: deque[int]() for name in "abc"}, dict[str, int]()
    for turn, name in enumerate(events):
        if name is not None:
            waiting[name].append(turn)
            queue.put(name, (name, turn))
        elif any(waiting.values()):
            taken, item = queue.take()
            assert item == waiting[taken].popleft()
            last_turn[taken] = turn
        assert len(queue) == sum(map(len, waiting.values()))
    order = [queue.take()[0] for _ in range(len(queue))]
    for place, taken in enumerate(order):  # nobody gets a second turn while another one waits for the first
        others = {name for name in order[place:] if name != taken}
        again = order.index(taken, place + 1) if taken in order[place + 1 :] else len(order)
        assert others <= set(order[place + 1 : again]) or again == len(order)
    with pytest.raises(KeyError):
        queue.take()


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=60))
def test_no_client_of_several_holds_more_than_half(capacity: int, asked: list[tuple[str, int]]) -> None:
    held = dict.fromkeys("abcd", 0)
    for name, num in asked:
        free = capacity - sum(held.values())
        if has_room(held[name], num, free, alone=False):
            held[name] += num
        assert has_room(0, 1, free, alone=False) == (free > 0)  # whoever has none gets one
    assert max(held.values()) <= max(capacity // 2, 1)
    assert sum(held.values()) <= capacity
    assert has_room(0, capacity, capacity, alone=True)
    assert not has_room(0, capacity + 1, capacity, alone=True)


def test_one_greedy_client_leaves_places_and_the_next_slot_to_others(tiny_pair: Pair) -> None:
    async def scenario() -> None:
        with replica_of(tiny_pair, num_slots=1, max_length=300, max_queue=7) as replica:
            app = app_of(replica, keys=KEYS)
            greedy = [HttpCall(app, COMPLETIONS, LONG, key="key-a") for _ in range(6)]
            await until(lambda: sum(call.status == 429 for call in greedy) == 2)
            assert "4 requests are in flight, 4 of them yours; at most 8" in next(c.text for c in greedy if c.text)
            modest = HttpCall(app, COMPLETIONS, LONG, key="key-b")
            await modest.task
            assert modest.status == 200
            assert sum(call.status == 200 for call in greedy) <= 2  # the one in the slot, and one more at most
            await asyncio.gather(*(call.task for call in greedy))
            assert sorted(call.status for call in greedy) == [200, 200, 200, 200, 429, 429]
            await idle(replica)

    asyncio.run(scenario())


def test_a_single_key_may_take_all_places(tiny_pair: Pair) -> None:
    async def scenario() -> None:
        with replica_of(tiny_pair, num_slots=1, max_length=300, max_queue=3) as replica:
            app = app_of(replica, keys=ApiKeys.of(("key-a",)))
            calls = [HttpCall(app, COMPLETIONS, LONG, key="key-a") for _ in range(5)]
            await asyncio.gather(*(call.task for call in calls))
            assert sorted(call.status for call in calls) == [200, 200, 200, 200, 429]
            await idle(replica)

    asyncio.run(scenario())
