"""An answer in JSON."""

from typing import Any

import msgspec
from starlette.responses import Response


class JsonResponse(Response):
    """Answers with one JSON value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the value."""
        return msgspec.json.encode(content)
