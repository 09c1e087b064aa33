"""The bench of vLLM with the plug-in: what is compared with what; the engines themselves need vLLM."""

import json
from pathlib import Path

import pytest

from jobs.bench.peers import DecodedBatch
from jobs.bench.vllm_plugin import CHOSEN, PLAIN, PluginBenchConfig, methods, overheads, table
from jobs.common.config import PairConfig


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path]) -> PluginBenchConfig:
    target, draft = map(str, tiny_pair_dirs)
    pair = PairConfig(target=target, draft=draft, dtype="float32")
    return PluginBenchConfig(pair=pair, policy="4", drafted=(1, 3), stock=(3,), own=(2,))


def test_one_engine_with_the_plugin_decodes_with_every_number(config: PluginBenchConfig) -> None:
    found = methods(config)
    names = [PLAIN, "vLLM, K=3", "plug-in, K=1", "plug-in, K=3", CHOSEN, "blockpilot, B=2", "blockpilot, trees"]
    assert list(found) == names
    assert len({method.engine for method in found.values()}) == 5
    asked = {name: method.more for name, method in found.items() if method.engine == found[CHOSEN].engine}
    assert asked == {"plug-in, K=1": {"block_size": 2}, "plug-in, K=3": {"block_size": 4}, CHOSEN: {}}
    adaptive, stock = (json.loads(found[name].engine) for name in (CHOSEN, "vLLM, K=3"))
    assert (adaptive["num_drafted"], adaptive["plugin"]["policy"]) == (3, "4")
    assert (stock["num_drafted"], stock["peer"]) == (3, "vllm")


def test_ratios_are_of_the_same_batches_with_their_intervals(config: PluginBenchConfig) -> None:
    def answered(*seconds: float) -> list[DecodedBatch]:
        return [DecodedBatch(each, [[1] * 10]) for each in seconds]

    of_load = {PLAIN: answered(2, 4), "vLLM, K=3": answered(1, 2), "plug-in, K=3": answered(1.1, 2.2)}
    first, second, third = table({1: of_load}).splitlines()[2:]
    assert "3.3 (1.00, 1.00 to 1.00)" in first
    assert "6.7 (2.00, 2.00 to 2.00)" in second
    assert "6.1 (1.82, 1.82 to 1.82)" in third
    assert overheads(config, {1: of_load}) == "- hooks with K=3 fixed, 1 at a time: +10.0% (+10.0% to +10.0%)\n"
