"""Cases of a client library against a server, in a process that has the library installed.

Run by `test_clients.py` with the Python of the client's environment, which need not have BlockPilot: this file
imports only a client and the standard library. It writes a line of JSON for every case to standard output; the
libraries' own output goes to standard error. Models are small, so cases check the form of answers only.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

Uses = Mapping[str, Callable[[], object]]
"""Test cases by name; a case fails if it raises, or if its result is None or empty."""
Settings = Mapping[str, str]
"""`url` of the server's root, `model`, and `tokenizer`, the directory of the target's tokenizer."""
LENGTH = 96
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "trip", "description": "Plans a trip.", "parameters": PARAMETERS}}
QUESTION = "Plan a trip to Rome."


def openai(settings: Settings) -> Uses:
    """OpenAI's library."""
    import openai
    from pydantic import BaseModel

    class Trip(BaseModel):
        days: Literal[1, 2, 3]
        is_long: bool

    client = openai.OpenAI(base_url=f"{settings['url']}/v1", api_key=_key())
    chats, model = client.chat.completions, settings["model"]
    chat = [{"role": "user", "content": QUESTION}]
    common = {"model": model, "temperature": 0, "max_tokens": LENGTH}

    def tool_loop() -> object:
        one_call = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        answer = chats.create(messages=chat, **one_call, **common).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "planned"} for call in answer.tool_calls]
        return chats.create(messages=[*chat, answer, *results], tools=[TOOL], **common).choices[0].message.content

    def streamed() -> str:
        chunks = chats.create(messages=chat, stream=True, stream_options={"include_usage": True}, **common)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    def refused() -> object:
        try:
            chats.create(messages=chat, model=model, temperature=9)
        except openai.BadRequestError as error:
            return error.param == "temperature"
        return None

    sampling = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"50": -100}, "seed": 1, "n": 2}
    extra = {"min_p": 0.05, "top_k": -1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    neutral = {"metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "key", "reasoning_effort": "none"}
    return {
        "models": lambda: client.models.list().data,
        "chat": lambda: chats.create(messages=chat, **common).choices[0].message.content,
        "chat, streamed": streamed,
        "chat, sampling": lambda: chats.create(messages=chat, extra_body=extra, **common, **sampling).choices[1],
        "chat, fields that change nothing": lambda: chats.create(messages=chat, **common, **neutral).choices,
        "chat, tool loop": tool_loop,
        "chat, parsed": lambda: chats.parse(messages=chat, response_format=Trip, **common).choices[0].message.parsed,
        "completions of a list": lambda: (
            client.completions.create(prompt=["Once", "Twice"], **common).choices[1].text
        ),
        "completions, echo": lambda: (
            client.completions.create(prompt="Once", echo=True, logprobs=1, **common).choices
        ),
        "an error": refused,
    }


def langchain(settings: Settings) -> Uses:
    """ChatOpenAI, OpenAI and agents of LangChain."""
    from langchain.agents import create_agent
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel

    class Journey(BaseModel):
        """A trip."""

        days: Literal[1, 2, 3]
        is_long: bool | None = None

    @tool
    def add(a: bool, b: bool) -> int:
        """Add two numbers."""
        return a + b

    server = {"base_url": f"{settings['url']}/v1", "api_key": _key(), "model": settings["model"]}
    server |= {"temperature": 0, "max_tokens": LENGTH}
    chat, text = ChatOpenAI(**server), OpenAI(**server)

    def tool_loop() -> object:
        messages = [HumanMessage("Add true and false.")]
        messages.append(chat.bind_tools([add], tool_choice="add").invoke(messages))
        messages += [add.invoke(call) for call in messages[-1].tool_calls]
        assert len(messages) > 2, messages
        return chat.bind_tools([add]).invoke(messages)

    return {
        "chat": lambda: chat.invoke(QUESTION).content,
        "chat, streamed": lambda: "".join(str(chunk.content) for chunk in chat.stream(QUESTION)),
        "chat, batch": lambda: chat.batch([QUESTION, "Hello"])[1].content,
        "completions": lambda: text.invoke("Once"),
        "completions, streamed": lambda: "".join(text.stream("Once")),
        "completions, batch": lambda: text.batch(["Once", "Twice"])[1],
        "tool loop": tool_loop,
        "structured, by schema": lambda: chat.with_structured_output(Journey, method="json_schema").invoke(QUESTION),
        "structured, by a call": lambda: chat.with_structured_output(Journey, method="function_calling").invoke(
            QUESTION
        ),
        "agent": lambda: create_agent(chat, tools=[add]).invoke({"messages": [HumanMessage(QUESTION)]})["messages"],
    }


def openai_agents(settings: Settings) -> Uses:
    """OpenAI's agents on chat completions."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Route(BaseModel):
        days: Literal[1, 2, 3]
        is_long: bool

    @function_tool
    def is_far(is_abroad: bool, is_north: bool | None = None) -> str:
        """Says whether a trip is far."""
        return "far" if is_abroad else "near"

    set_tracing_disabled(True)

    def agent(**more: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{settings['url']}/v1", api_key=_key())
        model = OpenAIChatCompletionsModel(model=settings["model"], openai_client=client)
        sampling = {"temperature": 0, "max_tokens": LENGTH, "include_usage": True} | more.pop("sampling", {})
        return Agent("guide", instructions="Be brief.", model=model, model_settings=ModelSettings(**sampling), **more)

    async def finished(**more: Any) -> object:
        return (await Runner.run(agent(**more), QUESTION)).new_items

    async def streamed(**more: Any) -> object:
        running = Runner.run_streamed(agent(**more), QUESTION)
        return [event async for event in running.stream_events()]

    one_call = {"tool_choice": "required", "parallel_tool_calls": False}
    tools = {"tools": [is_far], "sampling": one_call}
    sampling = {"sampling": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "metadata": {"a": "b"}}}
    return {
        "run": lambda: asyncio.run(finished()),
        "run, streamed": lambda: asyncio.run(streamed()),
        "run, sampling": lambda: asyncio.run(finished(**sampling)),
        "tool loop": lambda: asyncio.run(finished(**tools)),
        "tool loop, streamed": lambda: asyncio.run(streamed(**tools)),
        "output of a type": lambda: asyncio.run(finished(output_type=Route)),
        "handoff": lambda: asyncio.run(finished(handoffs=[agent()], sampling=one_call)),
    }


def pydantic_ai(settings: Settings) -> Uses:
    """Agents of Pydantic AI, with sets and optional arguments."""
    import enum

    from pydantic import BaseModel, Field
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    class Color(enum.Enum):
        RED = "red"
        BLUE = "blue"

    class Flag(BaseModel):
        colors: list[Color] = Field(max_length=2)  # a set has uniqueItems, which no grammar enforces: refused by name
        is_old: bool | None = None

    def paint(colors: set[Color], is_bright: bool | None = None, title: str | None = None) -> str:
        """Paint a flag in some colors."""
        return "painted"

    model = OpenAIChatModel(
        settings["model"], provider=OpenAIProvider(base_url=f"{settings['url']}/v1", api_key=_key())
    )

    def asked(question: str, **more: Any) -> object:
        sampling = ModelSettings(temperature=0, max_tokens=LENGTH)
        return Agent(model, model_settings=sampling, **more).run_sync(question).output

    async def streamed() -> object:
        agent = Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=LENGTH))
        async with agent.run_stream(QUESTION) as running:
            return [text async for text in running.stream_text(delta=True)]

    return {
        "run": lambda: asked(QUESTION),
        "run, streamed": lambda: asyncio.run(streamed()),
        "tools with a set and optionals": lambda: asked("Hello", tools=[paint]),
        "output by a call": lambda: asked("A red and blue flag", output_type=Flag),
        "output by a schema": lambda: asked("A red and blue flag", output_type=NativeOutput(Flag)),
    }


def litellm(settings: Settings) -> Uses:
    """LiteLLM with its providers hosted_vllm and openai."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    question = [{"role": "user", "content": QUESTION}]
    server = {"api_base": f"{settings['url']}/v1", "api_key": _key(), "temperature": 0, "max_tokens": LENGTH}
    sampling = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"50": -100}, "seed": 1, "n": 2}

    def chat(provider: str, messages: list[Any] = question, **more: Any) -> Any:
        return litellm.completion(model=f"{provider}/{settings['model']}", messages=messages, **server | more)

    def streamed(provider: str) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chat(provider, stream=True))

    def tool_loop(provider: str) -> object:
        answer = chat(provider, tools=[TOOL], tool_choice="required").choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "planned"} for call in answer.tool_calls]
        return chat(provider, [*question, answer.model_dump(), *results], tools=[TOOL]).choices

    def too_long(provider: str) -> object:
        try:
            chat(provider, max_tokens=10**6)
        except litellm.ContextWindowExceededError:
            return True
        return None

    def texts(provider: str) -> object:
        name = f"{provider}/{settings['model']}"
        return litellm.text_completion(model=name, prompt=["Once", "Twice"], **server).choices[1].text

    cases: dict[str, Callable[[], object]] = {}
    for provider, text_provider in (("hosted_vllm", "hosted_vllm"), ("openai", "text-completion-openai")):
        cases |= {
            f"{provider}: chat": partial(chat, provider),
            f"{provider}: chat, streamed": partial(streamed, provider),
            f"{provider}: chat, sampling": partial(chat, provider, **sampling),
            f"{provider}: tool loop": partial(tool_loop, provider),
            f"{provider}: completions of a list": partial(texts, text_provider),
            f"{provider}: a full context": partial(too_long, provider),
        }
    return cases


def llm(settings: Settings) -> Uses:
    """Simon Willison's llm."""
    folder = Path(tempfile.mkdtemp())
    os.environ["LLM_USER_PATH"] = str(folder)
    address = f"  model_name: {json.dumps(settings['model'])}\n  api_base: {settings['url']}/v1\n"
    chat = f"- model_id: chat\n{address}  supports_tools: true\n  supports_schema: true\n"
    (folder / "extra-openai-models.yaml").write_text(f"{chat}- model_id: text\n{address}  completion: true\n")
    import llm

    model, text = llm.get_model("chat"), llm.get_model("text")
    model.key = text.key = _key()
    options = {"temperature": 0, "max_tokens": LENGTH}
    sampling = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"50": -100}, "seed": 1}

    def conversation() -> str:
        talk = model.conversation()
        talk.prompt(QUESTION, **options).text()
        return str(talk.prompt("And back.", **options).text())

    def version() -> str:
        """The version of this program."""
        return "1.2"

    return {
        "prompt": lambda: model.prompt(QUESTION, stream=False, **options).text(),
        "prompt, streamed": lambda: "".join(model.prompt(QUESTION, **options)),
        "prompt, options": lambda: model.prompt(QUESTION, **options, **sampling).text(),
        "conversation": conversation,
        "tools": lambda: model.chain("Which version is this?", tools=[version], options=options).text(),
        "schema": lambda: json.loads(model.prompt(QUESTION, schema=PARAMETERS, **options).text()),
        "completions": lambda: text.prompt("Once", max_tokens=LENGTH).text(),
    }


def lm_eval(settings: Settings) -> Uses:
    """lm-eval's local-completions: choices by log probabilities, perplexity, generation."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(tempfile.mkdtemp())
    rows = [
        {"question": "The capital of France is", "choices": ["Paris", "a potato"], "answer": 0},
        {"question": "Two and two make", "choices": ["green", "four"], "answer": 1},
        {"question": "The sun rises in the", "choices": ["east", "pocket of a coat"], "answer": 0},
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    question, answer = {"doc_to_text": "{{question}}"}, "{{choices[answer]}}"
    options = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    until = {"generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False}}
    tasks = {
        "choice": {"output_type": "multiple_choice", **question, **options},
        "perplexity": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"},
        "generation": {"output_type": "generate_until", **question, "doc_to_target": answer, **until},
    }
    for name, metric in (("choice", "acc"), ("perplexity", "word_perplexity"), ("generation", "exact_match")):
        tasks[name]["metric_list"] = [{"metric": metric}]
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | data | task))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    answers_by_task: dict[str, Any] = {}

    def results(name: str, batch_size: int, **more: Any) -> object:
        """Answers of the server, which must not depend on the batch size or the form of the prompts."""
        server = {"model": settings["model"], "base_url": f"{settings['url']}/v1/completions"}
        server |= {"tokenizer": settings["tokenizer"], "tokenizer_backend": "huggingface", **more}
        done = lm_eval.simple_evaluate(
            model="local-completions", model_args=server, tasks=[name], batch_size=batch_size, task_manager=manager
        )
        assert done is not None
        answers = [sample["resps"] for sample in sorted(done["samples"][name], key=lambda s: s["doc_id"])]
        assert answers_by_task.setdefault(name, answers) == answers, (answers_by_task[name], answers)
        if name == "choice":
            assert done["results"][name]["acc,none"] == 1.0, done["results"]
        return answers

    kinds: dict[str, Any] = {"one by one": {"batch_size": 1}, "in batches": {"batch_size": 3}}
    kinds["in batches of strings"] = {"batch_size": 3, "tokenized_requests": False}
    return {f"{name}, {kind}": partial(results, name, **more) for name in tasks for kind, more in kinds.items()}


def aiperf(settings: Settings) -> Uses:
    """NVIDIA's load generator, with ignore_eos."""

    def load(endpoint: str) -> object:
        folder = Path(tempfile.mkdtemp())
        command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", settings["model"], "--streaming"]
        command += ["--url", settings["url"], "--endpoint-type", endpoint, "--tokenizer", settings["tokenizer"]]
        command += ["--concurrency", "2", "--request-count", "8", "--synthetic-input-tokens-mean", "30"]
        command += ["--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
        subprocess.run([*command, "--output-artifact-dir", folder], check=True, stdout=sys.stderr)
        report = json.loads((folder / "profile_export_aiperf.json").read_text())
        assert not report["error_summary"], report["error_summary"]
        lengths = report["output_sequence_length"]  # counted by its tokenizer
        assert lengths["min"] >= 15, lengths
        return report["request_count"]["avg"] == 8

    return {f"{endpoint}, ignore_eos": partial(load, endpoint) for endpoint in ("chat", "completions")}


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY") or "none"


def run(uses: Uses) -> Iterator[dict[str, str]]:
    """Run every case; yields its name and its problem, "" if it succeeded."""
    for name, use in uses.items():
        problem = ""
        try:
            result = use()
            problem = "" if result else f"no result: {result!r}"
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {"what": name, "problem": problem}


if __name__ == "__main__":
    client, settings = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    for use in run(globals()[client](settings)):
        print(json.dumps(use), file=answers, flush=True)
