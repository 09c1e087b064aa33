"""A replica of the server: one pair, one engine, and the policy that chooses its block sizes.

The policy is a small file beside the models. Another one is put to use in place, by Serve's `user_config` or because
the registry has a new champion; the models, and the requests in flight, stay.
"""

import logging
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch

from blockpilot.control.controller import FixedPolicy
from blockpilot.control.price import StepCosts
from blockpilot.engine.engine import Engine, cache_bytes
from blockpilot.evaluation.step_costs import hold_here, measured_up_to
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy
from blockpilot.policy.store import load_policy
from jobs.common.config import PairConfig
from jobs.common.registry import CHAMPION, model_name
from jobs.serving.champions import ChampionWatch
from jobs.serving.engine_loop import EngineLoop
from jobs.serving.metrics import DecoderMetrics
from jobs.serving.replies import Backend
from jobs.serving.schema import ApiError, Body

DEFAULT_MAX_LENGTH = 2048
MEMORY_FILE = Path("/proc/meminfo")
SWITCH_INTERVAL_S = 0.0002  # the engine's thread takes the interpreter back that soon; Python's own are 5 ms
COSTS_CONTEXT, COSTS_STEPS = 256, 3  # of step costs that have to be measured at the start
log = logging.getLogger("ray.serve.blockpilot")


class Decoder:
    """What Serve runs: answers bodies, and refuses them as values, since what is raised in a replica is a failure.

    user_config: `policy`, a block size, a directory, or "champion"; of the champion also `store`, the MLflow
    store, `follow_s`, how often to look for another one, and `folder`, where it is copied to.
    """

    def __init__(
        self,
        pair: PairConfig,
        *,
        num_threads: int,
        num_slots: int,
        max_length: int | None,
        max_prefill_tokens: int,
        max_queue: int,
        max_new_tokens: int | None,
        stream_interval_s: float,
        logs_prompts: bool,
    ) -> None:
        torch.set_num_threads(num_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loaded = pair.load()
        length = max_length or min(DEFAULT_MAX_LENGTH, loaded.max_length)
        check_memory(loaded, num_slots, length)
        engine = Engine(
            loaded,
            num_slots=num_slots,
            max_length=length,
            max_prefill_tokens=max_prefill_tokens,
        )
        sizes = {"num_slots": num_slots, "max_length": length, "cache_bytes": engine.cache_bytes}
        log.info("engine", extra={"model": loaded.id.target, **sizes})
        self._measured: StepCosts | None = None
        self._watch: ChampionWatch | None = None
        self._has_policy = False
        metrics = DecoderMetrics(engine, self._policy_now)
        self._backend = Backend(
            EngineLoop(engine, max_queue=max_queue, on_step=metrics.on_step),
            max_new_tokens=max_new_tokens,
            on_answer=metrics.on_answer,
            logs_prompts=logs_prompts,
            stream_interval_s=stream_interval_s,
        )

    # --- requests ---

    async def whole(self, body: Body) -> dict[str, Any] | ApiError:
        """The response in one piece, or why there is none."""
        try:
            return await self._backend.whole(body)
        except ApiError as error:
            return error

    async def chunks(self, body: Body) -> AsyncGenerator[dict[str, Any] | ApiError, None]:
        """The objects of a streamed response; the last one may be why there are no more."""
        try:
            async for chunk in self._backend.chunks(body):
                yield chunk
        except ApiError as error:
            yield error

    async def status(self) -> dict[str, Any]:
        """For /health."""
        found = await self._backend.status()
        followed = {} if self._watch is None else {"follows": self._watch.name, "error": self._watch.error or None}
        return found | {"policy": found["policy"] | followed, "pid": os.getpid()}

    def check_health(self) -> None:
        """Raise if the engine is broken; Serve then replaces the replica."""
        if not self._backend.loop.healthy:
            raise RuntimeError("the engine is broken")

    # --- policies ---

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Use another policy from the next prefill on; raises ValueError for one that is not there or cannot be used.

        At the start a champion that the registry cannot give is replaced by the last one that was copied.
        """
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        policy = user_config["policy"]
        if policy != CHAMPION:
            self._use(policy)
            return
        watch = ChampionWatch(
            model_name(self._backend.model),
            user_config["store"],
            Path(user_config["folder"]),
            user_config["follow_s"],
            use=self._use,
        )
        if watch.error and not self._has_policy and not watch.use_last_copy():
            watch.stop()
            raise ValueError(watch.error)
        self._watch = watch

    def _policy_now(self) -> tuple[int, bool]:
        """Version of the champion in use, 0 for none, and whether the registry's could not be used."""
        return (0, False) if self._watch is None else (self._watch.number, bool(self._watch.error))

    def _use(self, policy: int | str | Path, version: int = 0) -> None:
        if isinstance(policy, int):
            self._backend.set_policy(FixedPolicy(policy), {"name": f"block size {policy}", "version": None})
        else:
            learned = load_policy(policy)
            learned.check(self._backend.pair)
            described = {"name": str(policy), "version": version or None}
            self._backend.set_policy(learned, described, self._costs_for(learned))
        self._has_policy = True

    def _costs_for(self, policy: LearnedPolicy) -> StepCosts | None:
        """Those that the policy was trained with, if they are of such a device; else measured here, once."""
        if policy.costs is None:
            return None
        pair, num_slots, sizes = self._backend.pair, self._backend.loop.engine.num_slots, tuple(policy.candidates)
        for costs in (policy.costs, self._measured):
            if costs is not None and hold_here(costs, pair, sizes, num_slots):
                return costs
        self._measured = measured_up_to(pair, sizes, num_slots, COSTS_CONTEXT, num_steps=COSTS_STEPS)
        return self._measured


def check_memory(pair: Pair, num_slots: int, max_length: int) -> None:
    """Raise ValueError where the caches of so many slots do not fit into the memory that is left."""
    needed, free = cache_bytes(pair, num_slots, max_length), _free_bytes(pair.target.device)
    if free is not None and needed > free:
        raise ValueError(
            f"num_slots {num_slots} of {max_length} tokens: the caches take {needed / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are free; fewer slots, or a smaller max_length, are needed"
        )


def _free_bytes(device: torch.device) -> int | None:
    """Of a GPU, or of a machine that tells as Linux does; None where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not MEMORY_FILE.exists():
        return None
    lines = MEMORY_FILE.read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
