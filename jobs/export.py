"""Export: the best static number of drafted tokens, as a configuration file of vLLM or SGLang.

Each batch size gets the number of drafted tokens with the most expected tokens per second: tokens per step from the
sweep's rows, seconds per step from its step cost. vLLM takes one number per range of batch sizes, SGLang one number
for all of them. This job decodes nothing.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml
from pydantic import Field

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.evaluation.static import PromptTotals, StaticChoices, choose_static, ranges
from blockpilot.evaluation.tables import markdown, with_range
from blockpilot.pairs.checkpoints import EMBEDDED_DRAFT_DIRECTORY
from blockpilot.pairs.table import EMBEDDED_DRAFT
from blockpilot.storage import join, write_text
from blockpilot.sweep.rows import Metadata, difference, read_parts
from jobs.common.config import Config, LocalPath, Place, absolute_in_submitted_job, main

FILES = {"vllm": "vllm.json", "sglang": "sglang.yaml"}
USES = {
    "vllm": 'vllm serve {target} --speculative-config "$(cat {file})"',
    "sglang": "python -m sglang.launch_server --model-path {target} --config {file}",
}
Method = Literal["dflash", "dspark", "eagle3"]
IDLE_DRAFT = 0.15  # of a vLLM step with 0 drafted tokens: a loaded draft still reads every accepted token (LOG.md)


class ExportConfig(Config):
    """Sweep to read, serving engine, and output."""

    sweep: Place = "runs/sweep"
    """Output of jobs/sweep.py."""
    price: Place | None = None
    """Step cost of the machine that will serve (a `price.json`); by default the sweep's."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Engine that will serve, which decides the format of the file."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Largest batch size to choose for; by default the rows that the step cost was measured with. Larger batches get
    the same number of drafted tokens as this one."""
    single: bool = False
    """Write one number of drafted tokens for all batch sizes. vLLM needs this with data parallelism; SGLang always
    gets one number."""
    method: Method | None = None
    """Kind of the draft; by default eagle3 if the draft proposes token by token, otherwise dflash."""
    output: LocalPath = Path("runs/export")
    """Output directory of the file, vllm.json or sglang.yaml."""


class ExportResult(NamedTuple):
    """The file, and the choice for each batch size."""

    file: Path
    chosen: StaticChoices


class Acceptance(NamedTuple):
    """Totals of each prompt by block size, and the metadata of the sweep."""

    totals: dict[int, PromptTotals]
    num_prompts: int
    metadata: Metadata


def run(config: ExportConfig) -> ExportResult:
    """Write the file and print the table.

    Raises ValueError for a step cost of another pair, for fewer than two prompts, and if plain decoding is the
    fastest at every batch size.
    """
    absolute_in_submitted_job(config.output, "output")
    swept = read_acceptance(join(config.sweep, "rows"))
    price = read_price(config.price or join(config.sweep, PRICE_FILE))
    if mismatch := difference(
        {"pair": price.pair._asdict(), "dtype": price.dtype},
        {"pair": swept.metadata.pair._asdict(), "dtype": swept.metadata.dtype},
    ):
        raise ValueError(f"price and sweep are not of the same models ({mismatch})")
    batch_sizes = range(1, (config.max_batch_size or price.rows) + 1)
    idle_draft = IDLE_DRAFT if config.engine == "vllm" and not config.single else 0.0
    chosen = choose_static(swept.totals, price, batch_sizes, idle_draft=idle_draft)
    show(chosen, swept, price, config.engine)
    file = config.output / FILES[config.engine]
    write_text(file, to_text(config, chosen, swept.metadata, price))
    print(USES[config.engine].format(target=swept.metadata.pair.target, file=file))
    return ExportResult(file, chosen)


def read_acceptance(rows_path: Place) -> Acceptance:
    """Totals of a sweep's rows; raises ValueError as `read_parts` does."""
    rows, metadata = [], None
    for part in read_parts(rows_path):
        rows += [(row.taus, row.num_steps) for row in part.rows]
        metadata = part.metadata
    assert metadata is not None, "read_parts yields at least one part or raises"
    taus, steps = np.array(rows, dtype=float).transpose(1, 2, 0)  # [candidates, prompts]
    columns = enumerate(metadata.candidates)
    totals = {size: PromptTotals(taus[c] * steps[c], steps[c]) for c, size in columns}
    return Acceptance(totals, len(rows), metadata)


# --- the file ---


def to_text(config: ExportConfig, chosen: StaticChoices, metadata: Metadata, price: StepPrice) -> str:
    """Content of the engine's file; raises ValueError if plain decoding is the fastest."""
    method = config.method or ("eagle3" if price.is_sequential else "dflash")
    if config.engine == "sglang":
        return yaml.safe_dump(sglang_options(chosen, metadata, method), sort_keys=False)
    return json.dumps(vllm_options(chosen, metadata, method, single=config.single)) + "\n"


def vllm_options(chosen: StaticChoices, metadata: Metadata, method: Method, *, single: bool) -> dict[str, Any]:
    """vLLM's `--speculative-config`: numbers of drafted tokens, one less than block sizes."""
    schedule = [(first, last, size - 1) for first, last, size in ranges(chosen.choices)]
    if single:
        schedule = [(1, chosen.choices[-1].batch_size, chosen.single - 1)]
    max_drafted = max(num for _, _, num in schedule)
    _check_gain(max_drafted)
    draft = metadata.pair.draft
    options: dict[str, Any] = {"method": method, "model": draft_place(draft), "num_speculative_tokens": max_drafted}
    if options["model"] == draft:
        options["revision"] = metadata.pair.draft_revision
    if len(schedule) > 1:
        options["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return options


def sglang_options(chosen: StaticChoices, metadata: Metadata, method: Method) -> dict[str, Any]:
    """SGLang's options, as its `--config` takes them; SGLang counts the anchor as a draft token."""
    _check_gain(chosen.single - 1)
    draft = metadata.pair.draft
    options: dict[str, Any] = {
        "speculative-algorithm": method.upper(),
        "speculative-draft-model-path": draft_place(draft),
        "speculative-num-draft-tokens": chosen.single,
    }
    if options["speculative-draft-model-path"] == draft:
        options["speculative-draft-model-revision"] = metadata.pair.draft_revision
    if method == "eagle3":  # a chain, token by token
        options |= {"speculative-num-steps": chosen.single - 1, "speculative-eagle-topk": 1}
    return options


def draft_place(name: str) -> str:
    """Directory of a local draft, otherwise its hub id."""
    if name == EMBEDDED_DRAFT:
        return str(EMBEDDED_DRAFT_DIRECTORY)
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _check_gain(num_drafted: int) -> None:
    if num_drafted == 0:
        raise ValueError("plain decoding is the fastest: serve without a draft; no file is written")


# --- what the user sees ---


def show(chosen: StaticChoices, swept: Acceptance, price: StepPrice, engine: str) -> None:
    """Print a row for batch sizes 1, 2, 4 ... and the largest, and the conditions of the measurement."""
    metadata, last = swept.metadata, len(chosen.choices)
    rows = [c for c in chosen.choices if c.batch_size & (c.batch_size - 1) == 0 or c.batch_size == last]
    print(
        markdown(
            [
                {
                    "batch size": str(choice.batch_size),
                    "drafted tokens": str(choice.block_size - 1),
                    "tau": with_range(choice.tau, 2),
                    "expected speed-up": with_range(choice.speedup, 2),
                    f"over {chosen.single - 1} for all": with_range(choice.over_single, 3),
                }
                for choice in rows
            ]
        )
    )
    vllm_version = metadata.versions.get("vllm")
    print(
        f"tau of {swept.num_prompts} prompts at T={metadata.config.get('temperature', 0):g}; seconds of a step on"
        f" {price.device}, {price.dtype}, {price.context} tokens of context, up to {price.rows} rows (error"
        f" {price.error:.1%}), both by {f'vLLM {vllm_version}' if vllm_version else 'this project'}. Chosen on all"
        " prompts; intervals of 95% over the same prompts."
    )
    if engine != "vllm" or not vllm_version:
        print(f"warning: seconds of {engine}'s own steps may differ: {_remedy(engine)}")
    if last > price.rows:
        print(f"warning: batch sizes above {price.rows} are extrapolated")


def _remedy(engine: str) -> str:
    return "sweep with --engine vllm" if engine == "vllm" else "measure the choice there"


if __name__ == "__main__":
    main(ExportConfig, run)
