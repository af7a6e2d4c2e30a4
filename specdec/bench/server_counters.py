"""What a server counted on /metrics during a run, where it has the counters that vLLM made usual."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from specdec.bench.server import Server

_DRAFTS = "spec_decode_num_drafts_total"
_DRAFT_TOKENS = "spec_decode_num_draft_tokens_total"
_ACCEPTED = "spec_decode_num_accepted_tokens_total"
_ACCEPTED_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_QUERIES = "prefix_cache_queries_total"
_HITS = "prefix_cache_hits_total"
_NAMES = frozenset({_DRAFTS, _DRAFT_TOKENS, _ACCEPTED, _ACCEPTED_PER_POSITION, _QUERIES, _HITS})

_Key = tuple[str, str]  # name behind the prefix of the engine, and "position" where there is one


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters at one time, or the differences between two; summed over engines and models."""

    values: Mapping[_Key, float]

    def since(self, earlier: "ServerCounters") -> "ServerCounters":
        """What was counted between."""
        return ServerCounters({key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()})

    @property
    def num_drafts(self) -> int | None:
        """Rounds that drafted, each for one request."""
        return self._count(_DRAFTS)

    @property
    def num_draft_tokens(self) -> int | None:
        """Tokens that were drafted."""
        return self._count(_DRAFT_TOKENS)

    @property
    def num_accepted_tokens(self) -> int | None:
        """Draft tokens that were accepted."""
        return self._count(_ACCEPTED)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Accepted drafts by their place in the run, from 0; empty where it is not counted."""
        places = {
            int(label): int(value) for (name, label), value in self.values.items() if name == _ACCEPTED_PER_POSITION
        }
        return tuple(places.get(place, 0) for place in range(max(places, default=-1) + 1))

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens that the prefix cache had."""
        queries, hits = self._count(_QUERIES), self._count(_HITS)
        return hits / queries if queries and hits is not None else None

    def _count(self, name: str) -> int | None:
        value = self.values.get((name, ""))
        return None if value is None else int(value)


async def read_counters(server: Server) -> ServerCounters:
    """Read the counters; none where the server has no metrics, or none of these.

    Raises:
        ServerGoneError: The server cannot be reached.
    """
    answer = await server.ask("metrics")
    return parse_counters(answer.text if answer.is_ok else "")


def parse_counters(text: str) -> ServerCounters:
    """Read the counters out of Prometheus' text format; none out of anything else."""
    values: dict[_Key, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.rpartition(":")[2].removeprefix("specdec_")
                position = sample.labels.get("position", "")
                if name in _NAMES and position.isdigit() == (name == _ACCEPTED_PER_POSITION):
                    key = (name, position)
                    values[key] = values.get(key, 0.0) + sample.value
    except ValueError:
        return ServerCounters({})
    return ServerCounters(values)
