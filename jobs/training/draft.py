"""The draft that a job trains: its configuration, and what depends on its family."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, cast

import torch
from pydantic import Field, field_validator
from transformers import PretrainedConfig, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from blockpilot.draft_training.answers import Answer
from blockpilot.draft_training.eagle3_loss import Eagle3Loss
from blockpilot.draft_training.edges import EdgeLoss
from blockpilot.draft_training.loss import BlockLoss, DraftLoss
from blockpilot.draft_training.start import start_eagle3_from_target, start_from_target
from blockpilot.draft_training.training import DraftFitSettings
from blockpilot.draft_training.vocabulary import by_frequency
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import load_draft, new_draft_config, save_draft
from blockpilot.drafts.eagle3 import LEAST_VOCABULARY, Eagle3Model, eagle3_layer_ids
from blockpilot.drafts.eagle3_checkpoint import load_eagle3, new_eagle3, save_eagle3
from blockpilot.drafts.edges import Edges
from blockpilot.drafts.options import parse_options
from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.loading import load_target, load_tokenizer, network_config
from jobs.answers import AnswersConfig

EAGLE3_VOCABULARY = 16384  # tokens


class TrainDraftConfig(AnswersConfig):
    """Target, prompts, and the shape and training of the draft."""

    kind: Literal["dflash", "eagle3"] = "dflash"
    """Family of the draft: blocks in one pass, or chains token by token."""
    block_size: int = Field(default=8, ge=2)
    """Positions of a training block or chain, anchor included."""
    draft_vocab_size: int | None = Field(default=None, ge=LEAST_VOCABULARY)
    """Tokens that the draft proposes, the most frequent of the answers; by default all for DFlash (or those of
    `start`), 16,384 for EAGLE-3."""
    num_layers: int = Field(default=3, ge=1)
    """Decoder layers of a DFlash draft."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers the draft reads, 0 is the first; by default as many as a DFlash draft has, evenly spaced, or
    EAGLE-3's three."""
    markov_rank: int = Field(default=0, ge=0)
    """Rank of a DFlash draft's Markov head, which scores a token by the one before it; 0: none."""
    selector_rank: int = Field(default=0, ge=0)
    """Rank of a DFlash draft's candidate selector, which chooses a token by the one before it (DFlash 2); 0: none."""
    selector_top_k: int = Field(default=16, ge=2)
    """Best tokens of a position that the selector chooses among."""
    only_edges: bool = False
    """Train the selector or Markov head alone, on a draft (`start`) that stays as it is and may have none: what it
    says of the answers is computed once."""
    mask_token: str = "<empty_output>"
    """Token of the target's vocabulary that no text holds, for DFlash."""
    start: str = "target"
    """Initial weights: the target's last layers and final norm where their shapes fit (`target`), `random`, or those
    of a draft directory of the same shape."""

    @field_validator("start")
    @classmethod
    def _for_workers(cls, start: str) -> str:
        is_directory = start not in ("target", "random") and Path(start).is_dir()
        return str(Path(start).absolute()) if is_directory else start  # theirs is another working directory

    fit: DraftFitSettings = DraftFitSettings()

    stream_features: bool = False
    """Compute the target's features when a document is read, instead of once for all onto the disk."""
    checkpoint_every: int = Field(default=200, ge=1)
    """Steps between checkpoints, which also validate."""
    num_validation: int = Field(default=48, ge=1)
    """Held-out answers that a checkpoint validates on."""
    max_failures: int = Field(default=3, ge=0)
    """Lost workers to recover from."""

    num_workers: int = Field(default=1, ge=1)
    """Data-parallel Ray Train workers."""
    output: Path = Path("runs/draft")
    """Directory of checkpoints and of the exported draft (`draft/`)."""


def check_draft(config: TrainDraftConfig) -> None:
    """Raise ValueError where the target is of no known family, or has no draft of the shape asked for."""
    target = target_config(config)
    wrong = [i for i in config.target_layer_ids or () if not 0 <= i < target.num_hidden_layers]
    if wrong:
        raise ValueError(f"target_layer_ids {wrong[0]}: must be 0 to {target.num_hidden_layers - 1}")
    if (size := config.draft_vocab_size) is not None and size > target.vocab_size:
        raise ValueError(f"draft_vocab_size {size}: must be {LEAST_VOCABULARY} to {target.vocab_size}")
    for name in ("markov_rank", "selector_rank"):
        if config.kind == "eagle3" and getattr(config, name):
            raise ValueError(f"{name} {getattr(config, name)}: of a DFlash draft; must be 0 for EAGLE-3")
    if config.only_edges and not (config.markov_rank or config.selector_rank):
        raise ValueError("only_edges: needs a markov_rank or a selector_rank above 0")
    if config.only_edges and config.draft_vocab_size is not None:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size}: of the start, where only_edges is set")
    if config.only_edges and config.start in ("target", "random"):
        raise ValueError(f"only_edges: start must be a draft's directory, not {config.start}")
    fresh_draft(config)


def target_config(config: TrainDraftConfig) -> PretrainedConfig:
    """Configuration of the target's network; raises ValueError for one of no known family."""
    return network_config(find_target(config.target).directory)


def mask_token_id(config: TrainDraftConfig) -> int:
    """Id of the mask token; raises ValueError where the vocabulary does not have it."""
    tokenizer = load_tokenizer(find_target(config.target).directory)
    vocabulary = tokenizer.get_vocab()
    if config.mask_token not in vocabulary:
        raise ValueError(f"mask_token {config.mask_token!r}: not in the vocabulary of {config.target}")
    return int(vocabulary[config.mask_token])


def layer_ids_of(config: TrainDraftConfig) -> tuple[int, ...]:
    """The target's layers that the draft reads."""
    target = target_config(config)
    if config.kind == "dflash":
        return parse_options(_dflash_config(config, target)).target_layer_ids
    return config.target_layer_ids or eagle3_layer_ids(target.num_hidden_layers)


def fresh_draft(config: TrainDraftConfig) -> DraftModel | Eagle3Model:
    """The untrained draft; its weights depend only on the seed or on the draft to start from.

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
    has_new_edges = isinstance(start, DraftModel) and start.edges is None
    wanted, found = (_shape(each, target, with_edges=not has_new_edges) for each in (draft, start))
    if wanted != found:
        raise ValueError(f"start {config.start}: a draft of {found}, the configuration asks for {wanted}")
    if isinstance(draft, DraftModel) and isinstance(start, DraftModel) and has_new_edges:
        draft.load_state_dict(start.state_dict(), strict=False)
        draft.vocabulary = start.vocabulary
        return draft
    return start


def _dflash_config(config: TrainDraftConfig, target: PretrainedConfig) -> Qwen3Config:
    return new_draft_config(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        mask_token_id=mask_token_id(config),
        target_layer_ids=config.target_layer_ids,
        markov_rank=config.markov_rank,
        selector_rank=config.selector_rank,
        selector_top_k=config.selector_top_k if config.selector_rank else 0,
    )


def _shape(draft: DraftModel | Eagle3Model, target: PretrainedConfig, *, with_edges: bool) -> str:
    layer_ids = " ".join(map(str, draft.layer_ids(target.num_hidden_layers)))
    size = f"block size {draft.block_size}"
    if isinstance(draft, Eagle3Model):
        return f"{size}, {draft.options.draft_vocab_size} tokens, target layers {layer_ids}"
    options, shape = draft.options, f"{size}, {draft.config.num_hidden_layers} layers, target layers {layer_ids}"
    ranks = {"Markov head": options.markov_rank, "candidate selector": options.selector_rank}
    edges = "".join(f", {name} of rank {rank}" for name, rank in ranks.items() if rank and with_edges)
    return shape + edges


def draft_with_edges(config: TrainDraftConfig) -> tuple[DraftModel, Edges]:
    """A draft that stays as it is, and its edges, untrained or those that it has."""
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
    """The untrained draft with its loss, for its data.

    Queries and keys start at the scale of the first answer; an EAGLE-3 draft proposes the answers' tokens.
    """
    disable_progress_bar()
    model, _, _ = load_target(config.target, torch.bfloat16)
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    dtype = torch.bfloat16 if config.fit.autocast else torch.float32
    embedding, head = (cast(torch.Tensor, module.weight).detach().to(dtype) for module in modules)
    draft, from_target, fit = fresh_draft(config), config.start == "target", config.fit
    use_vocabulary(config, draft, answers)
    if isinstance(draft, DraftModel):
        if from_target:
            start_from_target(draft, model, answers[0].tokens)
        return BlockLoss(draft, embedding, head, weighting=fit.weighting, distill=fit.distill, overlap=fit.overlap)
    if from_target:
        start_eagle3_from_target(draft, model)
    return Eagle3Loss(draft, embedding, head, distill=fit.distill, overlap=fit.overlap)


def use_vocabulary(config: TrainDraftConfig, draft: DraftModel | Eagle3Model, answers: Iterable[Answer]) -> None:
    """Let a draft propose the most frequent tokens of the answers only, if it shall; an EAGLE-3 draft that goes on
    keeps its own.
    """
    of_answers, size = (answer.tokens[answer.num_prompt_tokens :] for answer in answers), config.draft_vocab_size
    if isinstance(draft, DraftModel):
        if size is not None:
            draft.vocabulary = by_frequency(of_answers, draft.config.vocab_size)[:size]
    elif config.start in ("target", "random"):
        draft.use_vocabulary(by_frequency(of_answers, draft.config.vocab_size)[: size or EAGLE3_VOCABULARY])


def export(draft: DraftModel | Eagle3Model, directory: Path) -> None:
    """Write the draft in its published format."""
    if isinstance(draft, DraftModel):
        save_draft(draft, directory)
    else:
        save_eagle3(draft, directory)
