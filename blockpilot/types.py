"""Plain data types of all packages: requests, steps, pairs, candidates. Imports no other module of this package."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # torch takes seconds to import, and a gateway of the server never needs it

LEAST_TEMPERATURE = 1e-5  # logits divided by less overflow float32


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request, applied in vLLM's order: bias, penalties, temperature, min_p, top_k, top_p.

    By default all are off: top_p 1, top_k 0 and min_p 0 have no effect. Temperatures below LEAST_TEMPERATURE are
    greedy. seed is an int64. Frequency and presence penalties count the answer's tokens, the repetition penalty also
    the prompt's. logit_bias may be passed as a mapping of token ids.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature}: must be a finite number, at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: must be at least 0 (0 is off)")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed}: must fit in a signed 64-bit integer")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p}: must be 0 to 1 (0 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} {value}: must be a finite number (0 is off)")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty}: must be a finite number above 0 (1 is off)"
            )
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            if type(token) is not int or token < 0 or not math.isfinite(value):
                raise ValueError(f"logit_bias {token!r}: {value!r}: must be a token id and a finite number")
        object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))


class PairId(NamedTuple):
    """Identity of a pair: names and revisions (a hub commit, or a hash of the local files)."""

    target: str
    target_revision: str
    draft: str
    draft_revision: str


@dataclass(frozen=True)
class CandidateSet:
    """The block sizes a policy may choose, smallest first; an output of the policy is an index into it."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("candidates (): at least one block size is needed")
        for size in self.sizes:
            if type(size) is not int or size < 1:
                raise ValueError(f"candidates {self.sizes}: {size!r} is not a block size; allowed: integers >= 1")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"candidates {self.sizes}: each must be larger than the one before")

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __getitem__(self, index: int) -> int:
        return self.sizes[index]


MAX_BLOCK_SIZE = 32
"""Largest block size of any draft, sweep or engine; larger ones cost more than they can gain."""

FinishReason = Literal["stop", "length"]

Layout = Literal["auto", "chain", "tree"]
"""Shape of the drafted tokens: a chain of first choices, or a tree of the most probable prefixes."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


DRAFTED, LOOKED_UP = 1, 2
SOURCE_NAMES = "constraint", "draft", "lookup", "both"
"""Names of the numbers in `Tree.sources`."""


class Tree(NamedTuple):
    """Tokens [n] of a row to verify, and their parents [n]: 0 is the anchor, i the node of tokens[i - 1].

    sources [n]: DRAFTED, LOOKED_UP or their sum; 0 for tokens that a constraint forces.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    @property
    def children(self) -> dict[tuple[int, int], int]:
        """Nodes by (parent, token); a parent's children have different tokens."""
        return {
            parent_and_token: i for i, parent_and_token in enumerate(zip(self.parents, self.tokens, strict=True), 1)
        }

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))


NO_TREE = Tree()


class Prefill(NamedTuple):
    """State of a request after its prompt; the only input of a policy.

    logits [vocab] float32 of the target at the last prompt token. context [draft hidden] float32: the draft's fused
    context vector there, None for a request that never drafts.
    """

    logits: Tensor
    context: Tensor | None
    num_prompt_tokens: int
    temperature: float = 0.0

    @property
    def probs(self) -> Tensor:
        """prefill_probs: the target's predictive distribution after the prompt, [vocab]."""
        return self.logits.softmax(dim=-1)


class Automaton(Protocol):
    """State of a constraint after the accepted tokens of a request. A `path` holds tokens proposed after them."""

    @property
    def error(self) -> Exception | None:
        """Error if the request can no longer follow the constraint, else None."""

    def take(self, token: int) -> None:
        """Accept a token; raises ValueError if it is not allowed."""

    def ends(self, path: Sequence[int] = ()) -> bool:
        """True if no token can follow the path."""
        ...

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """For each token, whether it is allowed after the path."""
        ...

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Forced tokens after the path: each is the only one allowed after those before it."""
        ...

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """Tokens allowed after the path, [vocab] bool; raises ValueError if the mask cannot be computed."""
        ...


class Constraint(Protocol):
    """Constraint, such as a grammar, on the texts of any number of requests."""

    def start(self) -> Automaton:
        """Automaton before the first token."""
        ...


def token_ids(tokens: Any, name: str = "prompt_ids") -> tuple[int, ...]:
    """Token ids of one text from a sequence, tensor or array of integers [n] or [1, n], or a tokenizer's output.

    Raises ValueError, with `name`, for text, several texts, padding, and values that are not integers.
    """
    if isinstance(tokens, str | bytes):
        raise ValueError(f"{name} {tokens[:20]!r}: is text; encode it by pair.tokenizer(text) or apply_chat_template")
    if isinstance(tokens, Mapping):
        if 0 in token_ids(tokens.get("attention_mask", ()), "attention_mask"):
            raise ValueError(f"{name}: some are padding (attention_mask 0); encode one text without padding")
        tokens = tokens.get("input_ids")
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(ids, Iterable):
        raise ValueError(f"{name} {ids!r}: must be a sequence of token ids")
    ids = tuple(entry.tolist() if hasattr(entry, "tolist") else entry for entry in ids)
    if ids and isinstance(ids[0], list | tuple):
        if len(ids) > 1:
            raise ValueError(f"{name} of {len(ids)} texts: must be those of one")
        return token_ids(ids[0], name)
    if wrong := [entry for entry in ids if type(entry) is not int]:
        raise ValueError(f"{name} with {wrong[0]!r}: must be token ids, whole numbers")
    return ids


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    prompt_ids: any input of `token_ids`, such as a list, a tensor or the output of a chat template.
    block_size: tokens that a step verifies, the anchor included; None: the engine chooses; 1: plain decoding.
    layout: shape of the drafted tokens.
    num_logprobs: number of most likely tokens to return with every emitted token, in addition to its log
    probability; None returns nothing.
    cache_salt: only requests with the same salt share the prefix cache.
    constraint: masks the target's tokens before top_k and top_p; returned log probabilities are without the mask. The
    request ends if no token can follow.
    min_new_tokens: stop tokens are masked before this many tokens, and stop strings are searched after them; a
    constraint that allows only stop tokens has priority.
    num_prompt_logprobs: as num_logprobs, for the prompt's tokens, which are then not read from the prefix cache.
    lookup: prompt lookup, which also verifies continuations of earlier matches in prompt and answer. None: the
    controller decides, and it is off with a fixed block size.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default=Sampling())
    block_size: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    num_logprobs: int | None = None
    layout: Layout = "auto"
    cache_salt: str = ""
    constraint: Constraint | None = None
    min_new_tokens: int = 0
    num_prompt_logprobs: int | None = None
    lookup: bool | None = None

    def __post_init__(self) -> None:
        stops = (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)
        object.__setattr__(self, "prompt_ids", token_ids(self.prompt_ids))
        object.__setattr__(self, "stop_token_ids", frozenset(token_ids(self.stop_token_ids, "stop_token_ids")))
        object.__setattr__(self, "stop_strings", stops)


class TokenLogprobs(NamedTuple):
    """Log probabilities of an emitted token and of the most likely ones, by the target at temperature 1."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Step:
    """Result of one step for one request.

    block_size 0 marks the prefill, which emits the first token without a verified block and carries `prefill`.
    num_accepted: number of drafted tokens among `tokens`. tree: all verified tokens. logprobs: those of `tokens`, if
    requested.
    texts: the text that each of `tokens` adds, for requests with stop strings; it ends before the stop string.
    num_reused: of a prefill, the prompt tokens read from the prefix cache.
    prompt_logprobs: of a prefill, those of the prompt's tokens if requested; None for the first token.
    """

    request_id: int
    tokens: tuple[int, ...]
    block_size: int
    num_accepted: int
    finish_reason: FinishReason | None
    prefill: Prefill | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprobs, ...] = ()
    texts: tuple[str, ...] = ()
    tree: Tree = NO_TREE
    num_reused: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def path(self) -> list[int]:
        """The nodes of `tree` that were accepted, in order."""
        children, nodes = self.tree.children, [0]
        for token in self.tokens[: self.num_accepted]:
            nodes.append(children[nodes[-1], token])
        return nodes[1:]

    @property
    def accepted_sources(self) -> list[int]:
        """`Tree.sources` of the accepted nodes, in order."""
        return [self.tree.sources[node - 1] for node in self.path] if self.num_accepted else []


class Candidates(NamedTuple):
    """The k best tokens [N, k] of N positions by the draft's scores under the target's sampling noise, best first.

    scores: normalised log probabilities, minus the logarithm of the token's exponential noise if `drawn` [N]
    (temperature above 0). log_probs: without the noise. Both are -inf for tokens that cannot be sampled.
    """

    tokens: Tensor
    scores: Tensor
    log_probs: Tensor
    drawn: Tensor

    def at(self, index: Sequence[int]) -> "Candidates":
        """The candidates of the positions `index`."""
        positions = self.tokens.new_tensor(index)
        return Candidates(*(values[positions] for values in self))


Policy = Callable[[Prefill], int]
"""Maps a request's prefill to its block size."""
