"""The transports by name, for settings."""

from enum import StrEnum


class TransportName(StrEnum):
    """What KV travels through from one engine to another."""

    LOCAL = "local"
    MOONCAKE = "mooncake"
    NIXL = "nixl"
