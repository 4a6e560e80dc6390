"""What goes wrong, as the interfaces' clients expect to be told."""

import logging
import re
from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from glm_gpu.errors import GlmGpuError, OverloadedError, RequestError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
# How our own messages name the field they are about: "temperature is 3, ..." or "messages[2].content: ...".
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*)(?: is |:)")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        param: the field of the request that it is about.
        code: OpenAI's name for it.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


@dataclass(frozen=True)
class Problem:
    """An error on its way to a client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        """Anthropic's type, which is OpenAI's too where that has one of its own."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    def openai(self) -> dict:
        """The body that OpenAI's clients read."""
        kind = "server_error" if self.status >= 500 and self.status != 503 else self.kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict:
        """The body that Anthropic's clients read."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """What tells a client whether and when to try again."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {"x-should-retry": "false"}


def problem_of(error: BaseException) -> Problem:
    """The problem that an exception is. What is a fault of ours is logged and told without its inside."""
    match error:
        case ApiError():
            return Problem(error.status, error.message, error.param, error.code)
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return Problem(error.status_code, str(error.detail))
        case RequestError():
            field = _FIELD.match(str(error))
            return Problem(400, str(error), field.group(1) if field else None)
        case OverloadedError() if "deadline" in str(error):
            return Problem(408, str(error), "deadline_s", "deadline_exceeded")
        case OverloadedError() if "shutting down" in str(error):
            return Problem(503, str(error), code="shutting_down")
        case OverloadedError():
            return Problem(429, str(error), code="queue_full")
        case MemoryError():
            return Problem(503, "the server has too little memory for this request; send a shorter one, or try later")
        case GlmGpuError() | OSError():
            log.error("a request failed: %s", error)
            return Problem(500, f"the model failed on this request: {error}")
    log.error("a request failed", exc_info=error)
    return Problem(500, "an internal error ended this request; the server's log has more")


def respond(request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that failed before anything was sent, in the shape of its interface."""
    problem = problem_of(error)
    return JSONResponse(problem_body(request.url.path, problem), problem.status, problem.headers())


def problem_body(path: str, problem: Problem) -> dict:
    """The body of an error on one of our paths."""
    return problem.anthropic() if path.startswith("/v1/messages") else problem.openai()


def _invalid(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "malformed")
        return Problem(400, f"the body is not valid JSON ({detail})", code="invalid_json")
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    names = [part for part in place if isinstance(part, int) or re.fullmatch(r"[a-z0-9_]{1,40}", part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).removeprefix(".")
    message = f"{param}: {first['msg']}" if param else f"the body is not as expected: {first['msg']}"
    return Problem(400, message, param or None)
