"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}} with a status."""

from __future__ import annotations

from starlette.responses import JSONResponse

from nemotron_ultra.errors import NemotronError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = 1


class ApiError(Exception):
    """Raised anywhere while a request is handled."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        self.message, self.status, self.param, self.code = message, status, param, code
        super().__init__(message)

    @classmethod
    def of(cls, error: NemotronError, param: str | None = None, code: str | None = None) -> ApiError:
        return cls(str(error), param=param, code=code)

    def content(self) -> dict[str, dict[str, str | None]]:
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_SECONDS)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.content(), self.status, headers)
