"""Where a process stands among the ranks of an engine, as a launcher such as `torchrun` tells it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands among the ranks.

    Attributes:
        rank: Rank of the process, 0..size - 1.
        size: Number of ranks.
        local_rank: Rank on this host, which chooses the GPU.
        host: Where the store is.
        port: Its port; 0 has rank 0 choose one.
        has_store: A launcher serves the store already.
        attempt: How often the launcher has started the ranks anew.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    has_store: bool
    attempt: int = 0

    def device(self, name: str) -> str:
        """Give the device of this rank: "cuda" means the GPU of its local rank."""
        return f"cuda:{self.local_rank}" if name == "cuda" else name

    def environ(self) -> dict[str, str]:
        """Give the variables from which `launched_place` reads this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.has_store),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
        }


def launched_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Read the place that a launcher gave this process; None where it was not launched as one of several ranks.

    Raises:
        ConfigError: The launcher's variables are incomplete.
    """
    if environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in environ:
        return None
    try:
        return Place(
            rank=int(environ["RANK"]),
            size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE say that this process is one of several, but {error} among RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT is missing or no number: start the ranks with torchrun, or unset "
            "RANK and WORLD_SIZE"
        ) from None
