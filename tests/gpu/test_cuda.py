"""Whole models and engines on a GPU in float32: against transformers, and one token at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import PairId, Prefill, Request, Sampling
from helpers.engines import NEVER, PROMPT, run, text_of
from helpers.policies import tiny_policy
from helpers.tiny import byte_tokenizer, tiny_draft, tiny_gemma, tiny_hybrid, tiny_mixture, tiny_sliding, tiny_target
from jobs.bench.gpu_models import FAMILIES as RANDOM
from jobs.bench.gpu_models import TINY, random_pair
from jobs.bench.gpu_step import Failures, check_texts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CUDA = torch.device("cuda")
SMALL: dict[str, Any] = TINY | {"initializer_range": 0.1}
NewModel = Callable[..., PreTrainedModel]


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=False))


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True))


FAMILIES: dict[str, NewModel] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3, windows": tiny_sliding,
    "qwen3_moe": tiny_mixture,
    "gemma3": tiny_gemma,
    "qwen3_5": tiny_hybrid,
}


@pytest.mark.parametrize("in_graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(family: str, in_graphs: bool) -> None:
    """Prompts, then chains on top of them, in rows of several lengths."""
    model = FAMILIES[family]().eval().to(CUDA)
    sizes, prompts = [1, 5, 3], [7, 40, 21]
    ids = [torch.randint(250, (a + b,), device=CUDA) for a, b in zip(sizes, prompts, strict=True)]
    expected = [model(tokens[None], output_hidden_states=True).hidden_states for tokens in ids]
    target = Target(model, (0, 2))
    cache = target.new_cache(len(ids), 128, num_spare=32)
    if in_graphs and not target.has_states:
        cache.graphs = Graphs(CUDA)
    for starts, ends in (([0] * 3, prompts), (prompts, [len(tokens) for tokens in ids])):
        widths = [end - start for start, end in zip(starts, ends, strict=True)]
        packing = Packing(widths, starts, CUDA)
        view = cache.view(packing.rows, packing.columns, slice(0, len(ids)), packing.length)
        tokens = torch.cat([row[start:end] for row, start, end in zip(ids, starts, ends, strict=True)])
        scored = target.score(tokens, view, packing, features=True)
        assert scored.features is not None
        after_layers = []
        for index in (1, 3, -1):  # after layers 0 and 2, and at the end, normed
            spans = zip(expected, starts, ends, strict=True)
            after_layers.append(torch.cat([states[index][0, start:end] for states, start, end in spans]))
        *features, hidden = after_layers
        torch.testing.assert_close(scored.hidden, hidden, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(scored.features, torch.cat(features, dim=-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_texts_are_those_of_one_token_at_a_time(family: str, temperature: float) -> None:
    """Chains and trees in a batch, by graphs, with the prefix cache: `jobs/bench/gpu_step.py --check`."""
    failures = Failures()
    pair = random_pair(RANDOM[family].new, CUDA, torch.float32, num_layers=2, block_size=8)
    check_texts(pair, family, temperature, ["graph"], failures)
    assert failures.names == []


@pytest.fixture
def load(tmp_path: Any) -> Callable[[NewModel], Pair]:
    """A family's pair, on the GPU."""

    def loaded(new: NewModel) -> Pair:
        target = new()
        target.save_pretrained(tmp_path / "target")
        byte_tokenizer().save_pretrained(tmp_path / "target")
        save_draft(tiny_draft(target), tmp_path / "draft", dtype=torch.float32)
        return load_pair(target=tmp_path / "target", draft=tmp_path / "draft", device="cuda", dtype="float32")

    return loaded


@pytest.mark.parametrize("new", [tiny_target, tiny_mixture, tiny_gemma, tiny_sliding, tiny_hybrid])
def test_the_text_does_not_depend_on_the_block_size(load: Callable[[NewModel], Pair], new: NewModel) -> None:
    pair, texts = load(new), set[tuple[int, ...]]()
    for size in (1, 2, 4, 8):
        sizes: Any = {"block_size": size, "max_new_tokens": 40, "temperature": 1.0, "stop_token_ids": NEVER}
        texts.add(text_of(list(generate(pair, PROMPT, **sizes))))
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_emit_the_text_of_kernels_one_by_one(load: Callable[[NewModel], Pair], temperature: float) -> None:
    pair, graphs = load(tiny_target), Graphs(CUDA)

    def texts(of: Graphs | None) -> Sequence[tuple[int, ...]]:
        engine = Engine(pair, num_slots=3, max_length=60, max_prefill_tokens=40, graphs=False)
        engine._cache.graphs = engine._drafter.cache.graphs = of
        requests = []
        for i, (size, layout) in enumerate([(1, "chain"), (4, "chain"), (7, "tree"), (2, "chain"), (12, "tree")]):
            kind: Any = {"block_size": size, "layout": layout}
            requests.append(Request(tuple(range(5, 12 + 9 * i)), 18, Sampling(temperature, seed=i), **kind))
        return [text_of(steps) for steps in run(engine, requests)]

    assert texts(graphs) == texts(None)
    assert len(graphs) > 4


def test_a_policy_follows_its_input() -> None:
    policy = tiny_policy(PairId("t", "0", "d", "0"), 64, (1, 2, 4))
    prefill = Prefill(torch.randn(64, generator=torch.Generator().manual_seed(0)), None, 5, 1.0)
    on_cpu = policy(prefill)
    assert policy(prefill._replace(logits=prefill.logits.cuda())) == on_cpu
