"""Draft that jobs/train_draft.py trains: its configuration, and the parts that depend on its family."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, field_validator
from transformers import PretrainedConfig, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from blockpilot.draft_training.answers import Answer
from blockpilot.draft_training.eagle3_loss import Eagle3Loss
from blockpilot.draft_training.edges import EdgeLoss
from blockpilot.draft_training.loss import BlockLoss, DraftLoss, by_frequency
from blockpilot.draft_training.start import check_start, start_eagle3_from_target, start_from_target
from blockpilot.draft_training.training import DraftFitSettings
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import load_draft, new_draft_config, save_draft
from blockpilot.drafts.eagle3 import LEAST_VOCABULARY, Eagle3Model, eagle3_layer_ids
from blockpilot.drafts.eagle3_checkpoint import load_eagle3, new_eagle3, save_eagle3
from blockpilot.drafts.edges import Edges
from blockpilot.drafts.options import CAUSAL, parse_options
from blockpilot.models.decoder import soft_cap
from blockpilot.models.target import embedding_table
from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.loading import load_target, load_tokenizer, network_config
from jobs.answers import AnswersConfig
from jobs.common.config import LocalPath

EAGLE3_VOCABULARY = 16384  # tokens


class TrainDraftConfig(AnswersConfig):
    """Target, prompts, shape of the draft, and training settings."""

    kind: Literal["dflash", "eagle3"] = "dflash"
    """Family of the draft. dflash: drafts a block in one pass. eagle3: drafts token by token."""
    block_size: int = Field(default=8, ge=2)
    """Positions of a training block or chain, including the anchor."""
    draft_vocab_size: int | None = Field(default=None, ge=LEAST_VOCABULARY)
    """Size of the draft's vocabulary, the most frequent tokens of the answers. By default the whole vocabulary for
    DFlash (or that of `start`), 16,384 tokens for EAGLE-3."""
    num_layers: int = Field(default=3, ge=1)
    """Number of decoder layers of a DFlash draft."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers whose hidden states the draft reads; 0 is the first. By default as many as a DFlash draft has
    layers, evenly spaced, or EAGLE-3's three."""
    markov_rank: int = Field(default=0, ge=0)
    """Rank of a DFlash draft's Markov head, which scores a token given the previous one; 0 for none."""
    selector_rank: int = Field(default=0, ge=0)
    """Rank of a DFlash draft's candidate selector (DFlash 2), which selects a token given the previous one; 0 for
    none."""
    selector_top_k: int = Field(default=16, ge=2)
    """Number of top tokens per position that the selector selects from."""
    causal: bool = False
    """Causal mask inside a DFlash draft's block, as in JetSpec (arXiv 2606.18394). By default every position attends
    to the whole block, or as in `start`."""
    only_edges: bool = False
    """Train only the selector or Markov head of a frozen draft (`start`), which need not have one yet. The draft's
    outputs on the answers are computed once."""
    mask_token: str = "<empty_output>"
    """Mask token of a DFlash draft: a token of the target's vocabulary that occurs in no text."""
    start: str = "target"
    """Initial weights: `target` (its last layers and final norm if their shapes fit), `random`, or the directory of a
    draft of the same shape."""

    @field_validator("start")
    @classmethod
    def _for_workers(cls, start: str) -> str:
        is_directory = start not in ("target", "random") and Path(start).is_dir()
        return str(Path(start).absolute()) if is_directory else start  # workers have another working directory

    fit: DraftFitSettings = DraftFitSettings()

    stream_features: bool = False
    """Compute the target's features each time that a document is read, instead of storing them on disk."""
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps between checkpoints, each with a validation."""
    num_validation: int = Field(default=48, ge=1)
    """Number of held-out answers in a validation."""
    max_failures: int = Field(default=3, ge=0)
    """Number of lost workers to recover from."""

    num_workers: int = Field(default=1, ge=1)
    """Number of data-parallel Ray Train workers."""
    output: LocalPath = Path("runs/draft")
    """Output directory of checkpoints and of the exported draft (`draft/`)."""

    def for_training(self) -> Self:
        """The configuration with an absolute target: Ray Train changes the working directory of its workers.

        `target` itself stays as it is given, since answers are named by it.
        """
        path = Path(self.target)
        return self.model_copy(update={"target": str(path.absolute())}) if path.is_dir() else self


def check_draft(config: TrainDraftConfig) -> None:
    """Raise ValueError for an unsupported target, or a draft of this shape that the target cannot have."""
    target = target_config(config)
    invalid = [i for i in config.target_layer_ids or () if not 0 <= i < target.num_hidden_layers]
    if invalid:
        raise ValueError(f"target_layer_ids {invalid[0]}: must be 0 to {target.num_hidden_layers - 1}")
    if (size := config.draft_vocab_size) is not None and size > target.vocab_size:
        raise ValueError(f"draft_vocab_size {size}: must be {LEAST_VOCABULARY} to {target.vocab_size}")
    for name in ("markov_rank", "selector_rank"):
        if config.kind == "eagle3" and getattr(config, name):
            raise ValueError(f"{name} {getattr(config, name)}: of a DFlash draft; must be 0 for EAGLE-3")
    if config.only_edges and not (config.markov_rank or config.selector_rank):
        raise ValueError("only_edges: needs a markov_rank or a selector_rank above 0")
    if config.only_edges and config.draft_vocab_size is not None:
        raise ValueError(
            f"draft_vocab_size {config.draft_vocab_size}: only_edges keeps the start's vocabulary, leave it unset"
        )
    if config.only_edges and config.start in ("target", "random"):
        raise ValueError(f"only_edges: start must be a draft's directory, not {config.start}")
    if config.start == "target":
        check_start(target)
    fresh_draft(config)


def target_config(config: TrainDraftConfig) -> PretrainedConfig:
    """Configuration of the target's network; raises ValueError for an unsupported family."""
    return network_config(find_target(config.target).directory)


def mask_token_id(config: TrainDraftConfig) -> int:
    """Id of the mask token; raises ValueError if the vocabulary does not contain it."""
    tokenizer = load_tokenizer(find_target(config.target).directory)
    vocabulary = tokenizer.get_vocab()
    if config.mask_token not in vocabulary:
        raise ValueError(f"mask_token {config.mask_token!r}: not in the vocabulary of {config.target}")
    return int(vocabulary[config.mask_token])


def layer_ids_of(config: TrainDraftConfig) -> tuple[int, ...]:
    """Ids of the target layers that the draft reads."""
    target = target_config(config)
    if config.kind == "dflash":
        return parse_options(_dflash_config(config, target)).target_layer_ids
    return config.target_layer_ids or eagle3_layer_ids(target.num_hidden_layers)


def fresh_draft(config: TrainDraftConfig) -> DraftModel | Eagle3Model:
    """The draft before training; its weights depend only on the seed or on the draft to start from.

    Raises ValueError for a draft of another shape or target.
    """
    torch.manual_seed(config.seed)
    target, is_dflash = target_config(config), config.kind == "dflash"
    draft: DraftModel | Eagle3Model
    if is_dflash:
        draft = DraftModel(_dflash_config(config, target))
    else:
        ids, any_tokens = config.target_layer_ids, torch.arange(config.draft_vocab_size or EAGLE3_VOCABULARY)
        draft = new_eagle3(target, any_tokens, block_size=config.block_size, target_layer_ids=ids)
    if config.start in ("target", "random"):
        return draft
    path = Path(config.start)
    start = (load_draft(path) if is_dflash else load_eagle3(path)).float()
    start.check_fit(target)
    if isinstance(start, DraftModel):
        start = _with_parts(start, config)
    expected_shape, start_shape = _shape(draft, target), _shape(start, target)
    if expected_shape != start_shape:
        raise ValueError(f"start {config.start}: a draft of {start_shape}, but the configuration is {expected_shape}")
    return start


def _with_parts(start: DraftModel, config: TrainDraftConfig) -> DraftModel:
    """The draft with a causal mask if configured, and with the configuration's edges if it has none."""
    parts: dict[str, int] = {"causal": True} if config.causal and not start.options.causal else {}
    if start.edges is None:
        parts |= _edge_options(config)
    if not any(parts.values()):
        return start
    kept = {name: value for name, value in (start.config.dflash_config or {}).items() if name not in CAUSAL}
    return start.with_options(kept | parts)


def _edge_options(config: TrainDraftConfig) -> dict[str, int]:
    top_k = config.selector_top_k if config.selector_rank else 0
    return {"markov_rank": config.markov_rank, "selector_rank": config.selector_rank, "selector_top_k": top_k}


def _dflash_config(config: TrainDraftConfig, target: PretrainedConfig) -> Qwen3Config:
    return new_draft_config(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        mask_token_id=mask_token_id(config),
        target_layer_ids=config.target_layer_ids,
        causal=config.causal,
        **_edge_options(config),
    )


def _shape(draft: DraftModel | Eagle3Model, target: PretrainedConfig) -> str:
    layer_ids = " ".join(map(str, draft.layer_ids(target.num_hidden_layers)))
    size = f"block size {draft.block_size}"
    if isinstance(draft, Eagle3Model):
        return f"{size}, {draft.options.draft_vocab_size} tokens, target layers {layer_ids}"
    options, shape = draft.options, f"{size}, {draft.config.num_hidden_layers} layers, target layers {layer_ids}"
    ranks = {"Markov head": options.markov_rank, "candidate selector": options.selector_rank}
    edges = "".join(f", {name} of rank {rank}" for name, rank in ranks.items() if rank)
    return shape + edges


def draft_with_edges(config: TrainDraftConfig) -> tuple[DraftModel, Edges]:
    """A frozen draft, and its edges: those of the checkpoint, or untrained ones."""
    draft = fresh_draft(config)
    assert isinstance(draft, DraftModel)
    assert draft.edges is not None
    return draft, draft.edges


def edge_loss(config: TrainDraftConfig) -> EdgeLoss:
    """The edges to train, with their loss."""
    model, _, _ = load_target(config.target, torch.bfloat16)
    embedding = cast(torch.Tensor, model.get_input_embeddings().weight).detach()
    edges = draft_with_edges(config)[1]
    return EdgeLoss(edges, embedding, distill=config.fit.distill, overlap=config.fit.overlap)


def draft_loss(config: TrainDraftConfig, answers: Sequence[Answer]) -> DraftLoss:
    """The draft before training, with its loss.

    With start `target`, scales of the target's activations are measured on the first answer. The vocabulary is that
    of `use_vocabulary`.
    """
    disable_progress_bar()
    model, _, _ = load_target(config.target, torch.bfloat16)
    head_weight = cast(torch.Tensor, model.get_output_embeddings().weight).detach()
    dtype = torch.bfloat16 if config.fit.autocast else torch.float32
    embedding, head = embedding_table(model).to(dtype), head_weight.to(dtype)
    draft, from_target, fit = fresh_draft(config), config.start == "target", config.fit
    goal: Any = {"distill": fit.distill, "overlap": fit.overlap, "cap": soft_cap(model.config)}
    use_vocabulary(config, draft, answers)
    if isinstance(draft, DraftModel):
        if from_target:
            start_from_target(draft, model, answers[0].tokens)
        return BlockLoss(draft, embedding, head, weighting=fit.weighting, **goal)
    if from_target:
        start_eagle3_from_target(draft, model, answers[0].tokens)
    return Eagle3Loss(draft, embedding, head, **goal)


def use_vocabulary(config: TrainDraftConfig, draft: DraftModel | Eagle3Model, answers: Iterable[Answer]) -> None:
    """Restrict the draft's vocabulary to the most frequent tokens of the answers, if configured; an EAGLE-3 draft
    that starts from a checkpoint keeps its vocabulary.
    """
    answer_tokens, size = (answer.tokens[answer.num_prompt_tokens :] for answer in answers), config.draft_vocab_size
    if isinstance(draft, DraftModel):
        if size is not None:
            draft.vocabulary = by_frequency(answer_tokens, draft.config.vocab_size)[:size]
    elif config.start in ("target", "random"):
        draft.use_vocabulary(by_frequency(answer_tokens, draft.config.vocab_size)[: size or EAGLE3_VOCABULARY])


def export(draft: DraftModel | Eagle3Model, directory: Path) -> None:
    """Write the draft in the published format of its family."""
    if isinstance(draft, DraftModel):
        save_draft(draft, directory)
    else:
        save_eagle3(draft, directory)
