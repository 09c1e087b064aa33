"""Queue of several clients: each is served in its own order, and clients in turn."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

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
