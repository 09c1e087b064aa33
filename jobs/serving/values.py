"""Types of the values of a request, as lenient as JSON and its clients are."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from jobs.serving.errors import short

MAX_BIASES = 1024
MAX_METADATA = 64  # fields; OpenAI takes 16


def whole(value: Any) -> Any:
    """JSON has one kind of number: 10.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: Any) -> Any:
    return bool(value) if type(value) is int and value in (0, 1) else value


Whole = Annotated[int, BeforeValidator(whole)]
Flag = Annotated[bool, BeforeValidator(_flag)]


def _biases(value: Any) -> dict[int, float]:
    """Token ids are strings in JSON."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must be an object of at most {MAX_BIASES} token ids, each with a number from -100 to 100")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"{short(token)} is no token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"token {token} has {short(bias)}; must be a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


def _metadata(value: Any) -> Any:
    is_map = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if not is_map or len(value) > MAX_METADATA:
        raise ValueError(f"must be an object of at most {MAX_METADATA} strings")
    return value


Biases = Annotated[dict[int, float], BeforeValidator(_biases)]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata)]
