"""The paper's table on small stand-ins for its four backbones: all its methods decode, given only the names."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config, save_draft
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.table import NAMED_PAIRS, NamedPair
from blockpilot.policy.store import save_policy
from blockpilot.prompts.files import load_prompts
from blockpilot.sweep.sweep import sweep_prompts
from helpers.eagle3 import random_eagle3
from helpers.policies import tiny_policy
from helpers.tiny import DFLASH2, EOS_ID, MASK_ID, byte_tokenizer
from jobs.evaluation.actor import Evaluator
from jobs.evaluation.inputs import Plan, group
from workflows import paper
from workflows.paper import PaperConfig

SHAPE = {
    **{"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 256},
    **{"eos_token_id": EOS_ID, "bos_token_id": None, "max_position_embeddings": 512},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BACKBONES: dict[str, Any] = {
    "qwen3-4b": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3-8b": Qwen3Config(**SHAPE),
    "qwen3-8b-dflash2": Qwen3Config(**SHAPE),
    "llama31-8b": LlamaConfig(**SHAPE),
    "qwen3-coder-30b-a3b": Qwen3MoeConfig(**SHAPE, **EXPERTS),
}


def stand_ins(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """Directories of a small target, its draft, and an EAGLE-3 draft."""
    torch.manual_seed(0)
    target: PreTrainedModel = AutoModelForCausalLM.from_config(BACKBONES[name])
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    trained = 10 if name == "llama31-8b" else 16
    shape: dict[str, Any] = DFLASH2 if name.endswith("dflash2") else {}
    shape = shape | {"num_layers": 1, "block_size": trained, "mask_token_id": MASK_ID, "target_layer_ids": (1, 3, 4)}
    save_draft(DraftModel(new_draft_config(target.config, **shape)), folder / "draft", dtype=torch.float32)
    eagle3 = random_eagle3(
        target.config, torch.arange(0, 260, 2), 8, head_norms="deepseek" in paper.PAPER_PAIRS[name].rivals[0]
    )
    save_eagle3(eagle3, folder / "eagle3", dtype=torch.float32)
    return folder / "target", folder / "draft", folder / "eagle3"


@pytest.mark.parametrize("name", paper.PAPER_PAIRS)
def test_every_method_of_the_table_decodes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, eagle3 = map(str, stand_ins(name, tmp_path))
    monkeypatch.setattr("jobs.evaluation.actor.measure_price", partial(measure_price, num_steps=1))
    monkeypatch.setitem(NAMED_PAIRS, name, NamedPair(target, draft))
    monkeypatch.setitem(paper.PAPER_PAIRS, name, paper.PAPER_PAIRS[name]._replace(rivals=(eagle3,)))
    stages = paper.pipeline(PaperConfig(pair=name, output=tmp_path, gpu=None, temperature=1.0))
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"question {i}?"}) + "\n" for i in range(2)))
    prompts = tuple(load_prompts(str(asked)))
    exact = stages.sweep.pair.model_copy(update={"dtype": "float32"})
    pair, candidates = exact.load(), stages.sweep.candidates
    assert candidates is not None
    swept = sweep_prompts(pair, prompts, [size for size in candidates if size > 1], max_new_tokens=6, temperature=1.0)
    assert [row.candidates for row in swept.rows] == [[size for size in candidates if size > 1]] * 2
    save_policy(tiny_policy(pair.id, pair.vocab_size, candidates), tmp_path / "policy")
    changes = {"pair": exact, "max_new_tokens": 6, "waves": 2, "baselines": ("untrained",)}
    plan = Plan(prompts, group(prompts, 2), None, {"policy": tmp_path / "policy"}, None, None)
    evaluator = Evaluator(stages.evaluate.model_copy(update=changes), plan)
    setting = evaluator.load()
    assert setting.rivals["eagle3"].draft == eagle3
    assert {"AR", "B=4", "B=8", "B=16", "B=32", "policy"} <= setting.block_sizes.keys()
    assert {"eagle3 B=4", "eagle3 B=8", "eagle3 tree 31", "eagle3 untrained"} <= setting.block_sizes.keys()
    runs = evaluator.measure(0, 0)
    assert len(runs) == 2 * len(setting.block_sizes)
    assert all(run.totals.num_equal == 1 for run in runs)
