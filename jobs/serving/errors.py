"""Errors in OpenAI's shape, and how values are shown in them."""

from reprlib import Repr

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 200, in OpenAI's error shape. Travels between processes."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        """WWW-Authenticate or Retry-After, where the status calls for it."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_BRIEF = Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 100


def short(value: object) -> str:
    """`repr` of the beginning of a value, cut at 80 characters."""
    shown = _BRIEF.repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
