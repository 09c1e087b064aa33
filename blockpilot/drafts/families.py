"""Draft families, by the architecture that a checkpoint names; the only module that lists all of them."""

from pathlib import Path

from transformers import PreTrainedModel

from blockpilot.drafts.base import Draft, PreparedDraft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import DFLASH_ARCHITECTURES, load_draft, read_config
from blockpilot.drafts.dflash_prepared import CachedDFlash, PreparedDFlash
from blockpilot.drafts.eagle3 import Eagle3Model
from blockpilot.drafts.eagle3_checkpoint import EAGLE3_ARCHITECTURES, load_eagle3
from blockpilot.drafts.eagle3_prepared import PreparedEagle3
from blockpilot.drafts.none import NoDraft, PreparedNoDraft
from blockpilot.drafts.options import ARCHITECTURE


def load_any_draft(directory: Path) -> Draft:
    """Read a checkpoint of any family into fp32 weights; raises ValueError, saying what is wrong with it."""
    stored = read_config(directory / "config.json")
    named = stored.get("architectures") if isinstance(stored, dict) else None
    architectures = named if isinstance(named, list) else [ARCHITECTURE]
    if any(name in DFLASH_ARCHITECTURES for name in architectures):
        return load_draft(directory)
    if any(name in EAGLE3_ARCHITECTURES for name in architectures):
        return load_eagle3(directory)
    supported = ", ".join((*DFLASH_ARCHITECTURES, *EAGLE3_ARCHITECTURES))
    raise ValueError(f"draft {directory}: architecture {named}: supported are {supported}")


def family(draft: Draft) -> str:
    """Short name of a draft's family; "none" without a draft."""
    if isinstance(draft, NoDraft):
        return "none"
    if isinstance(draft, DraftModel):
        if draft.options.is_dflash2:
            return "dflash2"
        return "dflash" if draft.edges is None else "dspark"
    return "eagle3"


def prepared_draft(draft: Draft, target: PreTrainedModel) -> PreparedDraft:
    """The draft prepared for a target; the linear layers of both are prepared in place, once."""
    if isinstance(draft, NoDraft):
        return PreparedNoDraft(target.device)
    if isinstance(draft, DraftModel):
        return PreparedDFlash(CachedDFlash(draft), target)
    assert isinstance(draft, Eagle3Model)
    return PreparedEagle3(draft, target)
