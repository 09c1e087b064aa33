"""vLLM behind the gateway of jobs/serve.py: its engine as EngineLoop steps it, and the policy of its plug-in.

vLLM's engine process steps by itself and queues what comes of it; a step here takes the outputs of one step there.
The policy lives in the scheduler of that process, and follows a file that is written here.
"""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from blockpilot.constraints.automaton import CompiledGrammar
from blockpilot.constraints.grammar import SEPARATORS, Grammar
from blockpilot.control.price import read_price
from blockpilot.device import best_device, device_name
from blockpilot.engine.detokenize import TextStream
from blockpilot.engine.limits import EngineLimits
from blockpilot.storage import write_text
from blockpilot.types import NO_TREE, FinishReason, Request, Sampling, Step, TokenLogprobs, Tree
from jobs.common.registry import UNTRAINED
from jobs.common.vllm_options import VllmOptions
from jobs.serving.backends import EngineSizes, PolicySource
from jobs.serving.engine_loop import EngineLoop
from jobs.vllm_plugin.hooks import SERVING_HOOKS, check_hooks
from jobs.vllm_plugin.pair import VllmPair
from jobs.vllm_plugin.policies import PluginSettings, ServedPair, chooser
from jobs.vllm_plugin.report import StepReport

LEAST_TEMPERATURE = 0.01  # vLLM raises what is below, but for 0
ENDED = "vLLM's engine process has ended"


class VllmBackend:
    """vLLM's engine on a pair, with the plug-in; ValueError for a price or a length that does not fit.

    options: of vLLM's engine; price: `price.json` of a sweep by vLLM, if any.
    """

    def __init__(self, pair: VllmPair, sizes: EngineSizes, *, options: VllmOptions, price: str | None) -> None:
        if sizes.max_length > pair.max_length:
            raise ValueError(f"max_length {sizes.max_length}: must be 2 to {pair.max_length}, the target's context")
        from jobs.vllm_plugin.engine import VllmEngine

        check_hooks(SERVING_HOOKS)
        self._served = ServedPair(pair.id.target, pair.id.draft, pair.vocab_size, max(pair.block_size - 1, 1))
        self._price = None if price is None else read_price(price)
        self._folder = tempfile.TemporaryDirectory(prefix="blockpilot-")
        self._policy = Path(self._folder.name) / "policy"
        self._name(pair.block_size)
        self.without_registry: tuple[PolicySource, ...] = (UNTRAINED if price else pair.block_size,)
        self._dtype = pair.dtype
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        settings = PluginSettings(
            policy=str(self._policy), target=pair.id.target, draft=pair.id.draft, price=price, reports=True
        )
        self._vllm = VllmEngine(
            pair.target,
            pair.draft,
            self._served.num_drafted,
            settings,
            dtype=pair.dtype,
            max_model_len=sizes.max_length,
            max_num_seqs=sizes.num_slots,
            enable_prefix_caching=False,  # a DFlash draft lacks the context of cached prefixes
            structured_outputs_config={"backend": "guidance"},  # the library that checks grammars here
            **options.engine_options,
        )
        limits = EngineLimits(sizes.max_length, pair.max_length, self._served.num_drafted + 1, pair.vocab_size)
        self.engine = VllmServedEngine(self._vllm.core, limits, sizes.num_slots, pair.tokenizer)

    @property
    def healthy(self) -> bool:
        return self.engine.alive

    @property
    def exactness(self) -> str:
        return "up to rounding: layers by vLLM"

    @property
    def status(self) -> dict[str, object]:
        """The price is the one of the start: the scheduler's own follows its steps."""
        price = self._price and self._price.by_name
        engine = f"vllm {self._vllm.version}"
        name = device_name(torch.device(best_device()))
        return {"engine": engine, "device": name, "dtype": self._dtype, "step_price_s": price}

    def put(self, policy: PolicySource, loop: EngineLoop) -> None:
        most = self._served.num_drafted + 1
        if isinstance(policy, int) and policy > most:
            raise ValueError(f"policy {policy}: a block size must be 1 to {most}, the draft's")
        chooser(str(policy), self._price, self._served)
        self._name(policy)

    def _name(self, policy: PolicySource) -> None:
        """Put a policy into the file that the scheduler looks at before every request."""
        write_text(self._policy, str(policy))

    def close(self) -> None:
        self.engine.close()
        self._folder.cleanup()


@dataclass
class VllmRow:
    """A request while vLLM holds it."""

    request: Request
    text: TextStream | None
    """Finds stop strings; None where the request has none."""
    has_begun: bool = False

    def cut(self, tokens: Sequence[int], reason: FinishReason | None) -> tuple[list[str], FinishReason | None]:
        """Texts that tokens add, up to the one that completes a stop string, and the reason that ends the request."""
        texts: list[str] = []
        if self.text is None:
            return texts, reason
        for i, token in enumerate(tokens):
            text = "" if token in self.request.stop_token_ids else self.text.push([token])
            if self.text.stopped:
                return [*texts, text], "stop"
            texts.append(text + self.text.finish() if reason and i == len(tokens) - 1 else text)
        return texts, reason


class VllmServedEngine:
    """vLLM's LLMEngine, `core`, as EngineLoop steps it."""

    num_waiting = num_kept_tokens = 0

    def __init__(self, core: Any, limits: EngineLimits, num_slots: int, tokenizer: Any) -> None:
        self.num_slots, self.max_length = num_slots, limits.max_length
        self.controller = SimpleNamespace(speculates=True)  # as the scheduler's last report says
        self.on_failure: Callable[[int, Exception], None] | None = None
        self.alive = True
        self._core, self._limits, self._tokenizer = core, limits, tokenizer
        self._rows: dict[int, VllmRow] = {}
        self._refused: list[tuple[int, Exception]] = []
        self._next_id = 0
        threading.Thread(target=self._watch, name="vllm", daemon=True).start()

    @property
    def cache_bytes(self) -> int | None:
        found: int | None = self._core.vllm_config.cache_config.kv_cache_memory_bytes
        return found

    @property
    def num_active(self) -> int:
        return len(self._rows)

    @property
    def idle(self) -> bool:
        return not self._rows

    def check(self, request: Request) -> None:
        self._limits.check(request)
        if request.layout == "tree":
            raise ValueError("layout 'tree': vLLM verifies chains; must be one of auto, chain")
        temperature = request.sampling.temperature
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature {temperature}: by vLLM it must be 0 or at least {LEAST_TEMPERATURE}")
        refuse_unserved(request)

    def add(self, request: Request) -> int:
        """Take in a request; one that vLLM refuses all the same ends in the next step."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        text = TextStream(self._tokenizer, request.stop_strings) if request.stop_strings else None
        self._rows[request_id] = VllmRow(request, text)
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        try:
            ignores_eos = self._tokenizer.eos_token_id not in request.stop_token_ids
            self._core.add_request(str(request_id), prompt, _params(request, ignores_eos))
        except Exception as error:
            self._refused.append((request_id, error))
        return request_id

    def cancel(self, request_id: int) -> None:
        if self._rows.pop(request_id, None) is not None and self.alive:
            self._core.abort_request([str(request_id)])

    def step(self) -> list[Step]:
        """Results of one step of vLLM; RuntimeError once its engine process has ended."""
        if not self.alive:
            raise RuntimeError(ENDED)
        refused, self._refused = self._refused, []
        for request_id, error in refused:
            self._fail(request_id, error)
        if not self._rows:
            return []
        steps = list[Step]()
        for output in self._core.step():
            request_id, (found,) = int(output.request_id), output.outputs
            if found.finish_reason not in (None, "stop", "length"):
                self._fail(request_id, RuntimeError(f"vLLM ended the request: {found.finish_reason}"))
            elif request_id in self._rows:
                steps.append(self._step(request_id, found, StepReport(**output.kv_transfer_params)))
        return steps

    def close(self) -> None:
        """End vLLM's processes."""
        self._core.engine_core.shutdown()

    def _watch(self) -> None:
        """Wait for the end of vLLM's engine process; who waits for its outputs would wait for ever."""
        core = self._core.engine_core
        connection.wait(core.resources.engine_manager.sentinels())
        self.alive = False
        core.outputs_queue.put_nowait(RuntimeError(ENDED))

    def _fail(self, request_id: int, error: Exception) -> None:
        if self._rows.pop(request_id, None) is not None and self.on_failure is not None:
            self.on_failure(request_id, error)

    def _step(self, request_id: int, found: Any, report: StepReport) -> Step:
        """The step of a request that vLLM's CompletionOutput tells of."""
        row, self.controller.speculates = self._rows[request_id], report.speculates
        texts, reason = row.cut(found.token_ids, found.finish_reason)
        tokens = tuple(found.token_ids[: len(texts)] if row.text else found.token_ids)
        is_prefill, row.has_begun = not row.has_begun, True
        if reason is not None:
            del self._rows[request_id]
            if found.finish_reason is None:  # a stop string, which vLLM does not look for
                self._core.abort_request([str(request_id)])
        drafted = tuple(report.drafted)
        accepted = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, drafted, strict=False))
        return Step(
            request_id,
            tokens,
            0 if is_prefill else len(drafted) + 1,
            num_accepted=len(list(accepted)),
            finish_reason=reason,
            logprobs=_logprobs(tokens, found.logprobs, row.request.num_logprobs),
            texts=tuple(texts),
            tree=Tree(drafted, tuple(range(len(drafted)))) if drafted else NO_TREE,
        )


def refuse_unserved(request: Request) -> None:
    """Raise ValueError for sampling that vLLM refuses or ignores beside drafts, and for what is not passed on."""
    sampling = request.sampling
    served = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    asked = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
    asked |= {"min_tokens": request.min_new_tokens or None, "prompt_logprobs": request.num_prompt_logprobs}
    for name, value in asked.items():
        if value != getattr(served, name, None):
            raise ValueError(f"{name} {value}: not with engine vllm")


def _params(request: Request, ignores_eos: bool) -> Any:
    from vllm.sampling_params import RequestOutputKind

    from jobs.vllm_plugin.engine import sampling_params

    constraint = request.constraint
    assert constraint is None or isinstance(constraint, CompiledGrammar)
    return sampling_params(
        request.sampling,
        request.block_size,
        max_tokens=request.max_new_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=ignores_eos,
        logprobs=request.num_logprobs,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=None if constraint is None else structured_outputs(constraint.grammar),
    )


def structured_outputs(grammar: Grammar) -> Any:
    """A grammar in the form that vLLM compiles with llguidance."""
    from vllm.sampling_params import StructuredOutputsParams

    if grammar.kind == "json":
        schema, spaces = json.loads(grammar.source), grammar.white_space
        written = {"x-guidance": SEPARATORS if spaces is None else {"whitespace_pattern": spaces}}
        return StructuredOutputsParams(json=json.dumps(schema | written if isinstance(schema, dict) else written))
    if grammar.kind == "choice":
        return StructuredOutputsParams(choice=json.loads(grammar.source))
    if grammar.kind == "regex":
        return StructuredOutputsParams(regex=grammar.source)
    return StructuredOutputsParams(grammar=grammar.source)


def _logprobs(
    tokens: Sequence[int], found: Sequence[Any] | None, num_logprobs: int | None
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities from vLLM's dictionaries, which hold a token's own and the likeliest ones."""
    if found is None or num_logprobs is None:
        return ()
    logprobs = []
    for token, entries in zip(tokens, found, strict=False):
        ranked = sorted(entries.items(), key=lambda item: item[1].rank)
        likeliest = tuple((each, entry.logprob) for each, entry in ranked[:num_logprobs])
        logprobs.append(TokenLogprobs(entries[token].logprob, likeliest))
    return tuple(logprobs)
