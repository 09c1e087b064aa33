"""Grammars over the byte tokenizer."""

from blockpilot.constraints.automaton import GrammarCompiler, GrammarError
from blockpilot.constraints.grammar import Grammar
from helpers.tiny import EOS_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, 260, frozenset({EOS_ID}))


def takes(grammar: Grammar, text: str) -> bool:
    """True if the grammar accepts the whole text."""
    automaton = COMPILER.compile(grammar).start()
    try:
        for token in TOKENIZER(text)["input_ids"]:
            automaton.take(token)
    except GrammarError:
        return False
    return automaton.ends() or automaton.allowed((), [EOS_ID]) == [True]
