"""API keys: who may use the API."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request

from specdec.serving.api_errors import ApiError


class ApiKeys:
    """Checks the key of a request, in the header of either API.

    Digests are compared, and all of them, so that the time says nothing about any key.

    Args:
        keys: Any of these is let in; without any everybody is.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, request: Request) -> None:
        """Refuse a request without a valid key.

        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))
        if not sum(hmac.compare_digest(given, digest) for digest in self._digests):
            raise ApiError(
                401,
                "an API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
