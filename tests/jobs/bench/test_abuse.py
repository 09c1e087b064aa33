"""Every kind of abuse is answered, none with an internal error, and the report tells right from wrong."""

import asyncio
from collections import Counter

import pytest

from blockpilot.pairs.loading import Pair
from helpers.api import app_of, over_http, replica_of
from jobs.bench import abusers
from jobs.bench.abuse import LOST, Report, _outcome, shown
from jobs.bench.abusers import Abuser
from jobs.bench.http_load import Received
from jobs.serving import listener
from jobs.serving.api import Limits
from jobs.serving.keys import ApiKeys


def test_abusers_are_answered_and_get_no_internal_error(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abusers, "READER_S", 0.1)
    monkeypatch.setattr(abusers, "NUM_AT_ONCE", 20)
    monkeypatch.setattr(abusers, "GRAMMARS", {"wrong": abusers.GRAMMARS["wrong"]})
    monkeypatch.setattr(listener, "LOOK_S", 0.2)
    limits = Limits(max_body_bytes=2**16, timeout_s=5, body_timeout_s=0.3)
    found: Counter[str] = Counter()

    async def abuse(root: str) -> None:
        abuser = Abuser(int(root.rpartition(":")[2]), "a-key", "target", seed=1)
        for _ in range(60):
            found[await abuser.abuse()] += 1

    with replica_of(tiny_pair, num_slots=2, max_length=500, max_queue=6) as replica:
        app = app_of(replica, keys=ApiKeys.of(("a-key", "another")), limits=limits)
        with over_http(app) as root:
            asyncio.run(abuse(root))
    kinds = {"absurd: 400", "junk: 400", "leave: left", "oversized: 413", "slow body: 408", "slow reader: 200"}
    kinds |= {"grammar: wrong 400", "slow bodies: 408", "endless head: 400"}
    assert kinds <= found.keys()
    assert not [kind for kind in found if "500" in kind or "Error" in kind]


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (Received(0, 200, text="yes"), "right"),
        (Received(0, 200, text="no"), "wrong"),
        (Received(0, 429, error="full"), "refused"),
        (Received(0, 200, text="y", error=LOST), "on a lost replica"),
        (Received(0, 200, text="y", error="the stream was cut"), "lost"),
        (Received(0, 0, error="ConnectError"), "lost"),
    ],
)
def test_answers_are_told_apart(received: Received, outcome: str) -> None:
    assert _outcome(received, "yes") == outcome


def test_a_lost_answer_an_internal_error_and_a_slow_health_are_broken_promises() -> None:
    kept = Report(Counter(right=3, refused=1), Counter({"absurd: 400": 2, "leave: 503": 1}), health_s=[0.1, 4.9])
    assert kept.kept
    assert "every promise was kept" in shown(kept)
    for broken in (
        Report(Counter(right=3, lost=1), health_s=[0.1]),
        Report(Counter(wrong=1), health_s=[0.1]),
        Report(Counter(right=3), Counter({"junk: 500": 1}), health_s=[0.1]),
        Report(Counter(right=3), health_s=[0.1, 5.1]),
    ):
        assert not broken.kept
        assert "a promise was broken" in shown(broken)
