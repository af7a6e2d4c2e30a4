"""The settings of a server, checked before anything is loaded."""

from dataclasses import dataclass

from specdec.errors import ConfigError

MAX_TIMEOUT_S = 86400.0 * 7


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How a server names its model and what it puts up with.

    Attributes:
        model_names: Names that requests may give; replies bear the one that was given, the first where none was.
        api_keys: Any of these opens the API; none leaves it open to whoever reaches it.
        max_queued_requests: Completions that may wait behind those that run.
        max_body_bytes: Bytes of a request's body.
        request_timeout_s: Seconds from a request's arrival to its end.
        client_timeout_s: Seconds in which a client must have sent its request, and in which it must take more of what
            it is sent.
        drain_timeout_s: Seconds that running requests are given once the server is told to end.
        allowed_origins: Origins of web pages that may call the API; none by default.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_queued_requests: int = 256
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 3600.0
    client_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError(f"served_model_name must be at least one name, none empty, got {list(self.model_names)}")
        if not all(self.api_keys) or any(not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigError("api_key must not be empty, and hold ASCII characters without blanks around them")
        if self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests must be >= 0, got {self.max_queued_requests}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
        for name in ("request_timeout_s", "client_timeout_s", "drain_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                raise ConfigError(f"{name} must be positive and at most {MAX_TIMEOUT_S:g}, got {getattr(self, name)}")
