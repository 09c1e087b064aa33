"""Plain data that every package speaks of: requests and steps, pairs and candidates. Imports nothing of ours."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # torch takes seconds to import, and a gateway of the server never needs it

LEAST_TEMPERATURE = 1e-5  # scores divided by less leave float32


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. The defaults change nothing.

    They act in vLLM's order: bias, penalties, temperature, min_p, top_k, top_p.

    temperature 0 is greedy, and so is any below LEAST_TEMPERATURE; top_p 1, top_k 0 and min_p 0 are off; seed is an
    int64. Frequency and presence count the tokens of the answer, repetition those of the prompt as well. logit_bias
    may be given as a mapping of token ids.
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
    """What a policy is made for: names and revisions (a hub commit, or a hash of the local files)."""

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
"""Of any draft, sweep or engine; a larger one would cost more than any draft brings."""

FinishReason = Literal["stop", "length"]

Layout = Literal["auto", "chain", "tree"]
"""What a draft's tokens are verified as: first choices one after the other, or the most probable prefixes."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


DRAFTED, LOOKED_UP = 1, 2
SOURCE_NAMES = "constraint", "draft", "lookup", "both"
"""By the numbers in `Tree.sources`."""


class Tree(NamedTuple):
    """Tokens of a row that are verified [n], and the parent of each: 0 is the anchor, i the token tokens[i - 1].

    sources [n]: DRAFTED, LOOKED_UP or the sum of both; 0 where a constraint left nothing else.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    @property
    def children(self) -> dict[tuple[int, int], int]:
        """Nodes by their parent and their token, which is among a parent's children only once."""
        return {place: i for i, place in enumerate(zip(self.parents, self.tokens, strict=True), 1)}

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))


NO_TREE = Tree()


class Prefill(NamedTuple):
    """What is known of a request after its prompt, and all that a policy sees.

    logits [vocab] float32 of the target at the last prompt token; context [draft hidden] float32, the draft's fused
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
    """State of a constraint after the final tokens of a request. A `path` are tokens that may follow them."""

    @property
    def error(self) -> Exception | None:
        """Why nothing may follow any more, where the constraint has failed."""

    def take(self, token: int) -> None:
        """Make a token final; raises ValueError for one that may not follow."""

    def ends(self, path: Sequence[int] = ()) -> bool:
        """True where nothing can follow."""
        ...

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Which of some tokens may come after the path."""
        ...

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Tokens each of which is the only one that may come next."""
        ...

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """All tokens that may come after the path, [vocab] bool; ValueError where that cannot be said."""
        ...


class Constraint(Protocol):
    """A grammar, say, that the texts of any number of requests follow."""

    def start(self) -> Automaton:
        """Its state before the first token."""
        ...


def token_ids(given: Any, name: str = "prompt_ids") -> tuple[int, ...]:
    """Token ids of one text: a sequence, tensor or array of integers [n] or [1, n], or what a tokenizer returns.

    Raises ValueError, by `name`, for text, several texts, padding, and what is no whole number.
    """
    if isinstance(given, str | bytes):
        raise ValueError(f"{name} {given[:20]!r}: is text; encode it by pair.tokenizer(text) or apply_chat_template")
    if isinstance(given, Mapping):
        if 0 in token_ids(given.get("attention_mask", ()), "attention_mask"):
            raise ValueError(f"{name}: some are padding (attention_mask 0); encode one text without padding")
        given = given.get("input_ids")
    ids = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(ids, Iterable):
        raise ValueError(f"{name} {ids!r}: must be a sequence of token ids")
    ids = tuple(each.tolist() if hasattr(each, "tolist") else each for each in ids)
    if ids and isinstance(ids[0], list | tuple):
        if len(ids) > 1:
            raise ValueError(f"{name} of {len(ids)} texts: must be those of one")
        return token_ids(ids[0], name)
    if wrong := [each for each in ids if type(each) is not int]:
        raise ValueError(f"{name} with {wrong[0]!r}: must be token ids, whole numbers")
    return ids


@dataclass(frozen=True)
class Request:
    """One sequence to decode. block_size None leaves it to the engine; 1 never drafts.

    prompt_ids: whatever `token_ids` takes, such as a list, a tensor or what a chat template returns.
    block_size: tokens that a step verifies, the anchor among them. layout: what they are laid out as.
    num_logprobs: how many of the likeliest tokens come with every emitted one, and its own; None for nothing.
    cache_salt: only requests with the same one share kept prefixes.
    constraint: the target chooses among the tokens that it allows, before top_k and top_p; log probabilities stay the
    target's own. The request ends where nothing can follow.
    min_new_tokens: before so many tokens stop tokens have no chance, and stop strings are looked for in the text
    after them; a constraint that leaves nothing else wins.
    num_prompt_logprobs: the same as num_logprobs for the prompt's own tokens, which are then all computed.
    lookup: what followed where the text's end stood before in the prompt or the answer is verified, too; None: where
    the controller chooses, and not beside a fixed block size.
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
    """Log probabilities of an emitted token and of the likeliest ones, by the target alone (temperature 1)."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Step:
    """What one step made final for one request.

    block_size 0 marks the prefill, which emits the first token without verifying a block and carries `prefill`.
    num_accepted counts the drafted tokens among `tokens`; `tree` is all that was drafted and verified. logprobs are
    those of `tokens`, where they were asked for.
    texts are what each of `tokens` adds to the text of a request with stop strings; it ends before the stop string.
    num_reused: of a prefill, the prompt tokens that were kept of other requests and not computed.
    prompt_logprobs: of a prefill, those of the prompt's tokens, where they were asked for; None of the first one.
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
        """What proposed each of the accepted nodes, in order: DRAFTED, LOOKED_UP, the sum of both, or 0 (`Tree`)."""
        return [self.tree.sources[node - 1] for node in self.path] if self.num_accepted else []


class Candidates(NamedTuple):
    """The k tokens [N, k] that would win a position's race if the target's scores were a draft's, best first.

    scores: what the race compares, relative to all scores of the position: log probabilities, less the logarithm of
    the token's own noise where tokens are `drawn` [N] (temperature above 0). log_probs are without it. Both are -inf
    for what cannot be drawn.
    """

    tokens: Tensor
    scores: Tensor
    log_probs: Tensor
    drawn: Tensor

    def at(self, index: Sequence[int]) -> "Candidates":
        """Those of some positions."""
        places = self.tokens.new_tensor(index)
        return Candidates(*(values[places] for values in self))


Policy = Callable[[Prefill], int]
"""A block size for the whole request, out of its prefill."""
