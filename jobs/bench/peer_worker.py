"""Worker process of a peer in the comparison: loads once, then decodes batches that it reads as lines of JSON.

Run by `jobs/bench/peers.py` with the Python that has the peer installed. vLLM's Python may lack BlockPilot, so this
file imports only a peer and the standard library. It writes one line of JSON per batch to standard output; the
libraries' own output goes to standard error.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Batch = list[list[int]]
Decode = Callable[[Batch, int], list[list[int]]]
"""(prompts, number of tokens) -> the tokens of every answer."""


def blockpilot(settings: dict[str, Any]) -> Decode:
    """This engine, with block size `num_drafted` + 1, or adaptive; with prompt lookup if there is no draft."""
    import torch

    from blockpilot.control.acceptance import AcceptanceModel
    from blockpilot.control.controller import Controller
    from blockpilot.engine.engine import Engine
    from blockpilot.evaluation.pricing import measure_price
    from blockpilot.pairs.loading import load_pair
    from blockpilot.types import Request

    torch.set_num_threads(settings["threads"])
    pair = load_pair(target=settings["target"], draft=settings["draft"], dtype=settings["dtype"])
    options: dict[str, Any] = {"block_size": settings["num_drafted"] + 1}
    controller = None
    if settings["chooses"]:
        options = {}
        price = measure_price(pair, rows=settings["max_rows"], context=256)
        controller = Controller(AcceptanceModel(pair.block_size - 1), price)

    def decode(prompts: Batch, num: int) -> list[list[int]]:
        length = max(map(len, prompts)) + num
        engine = Engine(pair, num_slots=len(prompts), max_length=length, controller=controller)
        answers: dict[int, list[int]] = {engine.add(Request(tuple(p), num, **options)): [] for p in prompts}
        while not engine.idle:
            for step in engine.step():
                answers[step.request_id] += step.tokens
        return list(answers.values())

    return decode


def transformers(settings: dict[str, Any]) -> Decode:
    """`generate` of transformers on a padded batch, plain decoding."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def decode(prompts: Batch, num: int) -> list[list[int]]:
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        outputs = model.generate(tokens, attention_mask=mask, max_new_tokens=num, do_sample=False, pad_token_id=0)
        return [answer.tolist() for answer in outputs[:, width:]]

    return decode


def vllm(settings: dict[str, Any]) -> Decode:
    """vLLM with a speculative configuration, or none."""
    cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    # By default vLLM reserves a core for its front end, and binds all threads to the others.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    engine = LLM(
        settings["target"],
        dtype=settings["dtype"],
        max_model_len=1024,
        max_num_seqs=32,
        speculative_config=settings["speculative_config"],
        enforce_eager=settings["enforce_eager"],
    )

    def decode(prompts: Batch, num: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=num, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in outputs]

    return decode


def llama_cpp(settings: dict[str, Any]) -> Decode:
    """llama-bench, one request, plain decoding; it decodes its own tokens, so only their number is comparable."""
    command = [settings["program"], "-m", settings["target"], "-t", str(settings["threads"]), "-o", "json", "-r", "1"]

    def decode(prompts: Batch, num: int) -> list[list[int]]:
        (prompt,) = prompts
        test = ["-p", "0", "-n", "0", "-pg", f"{len(prompt)},{num}"]
        (report,) = json.loads(subprocess.check_output([*command, *test], stderr=subprocess.DEVNULL))
        settings["seconds"] = report["avg_ns"] / 1e9
        return [[0] * num]

    return decode


PEERS = {
    "blockpilot": blockpilot,
    "transformers": transformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    decode = PEERS[settings["peer"]](settings)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        batch = json.loads(line)
        started = time.perf_counter()
        tokens = decode(batch["prompts"], batch["num_tokens"])
        seconds = settings.pop("seconds", time.perf_counter() - started)
        print(json.dumps({"seconds": seconds, "answers": tokens}), file=answers)


if __name__ == "__main__":
    main()
