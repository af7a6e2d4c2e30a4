"""What an engine says about the hand-off of prompts, as the side that takes them and as the side that gives them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from specdec.handoff.intake import Intake
from specdec.handoff.prefill_link import LinkCounts, LinkState
from specdec.prefill.outgoing import OutgoingCounts
from specdec.prefill.server import PrefillServer

Series = dict[tuple[str, ...], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillGauges:
    """One prefill, as a decode group sees it.

    Attributes:
        address: Of the prefill.
        state: Whether it can be given prompts.
        num_queued_tokens: Prompt tokens that it was given and has not computed.
        counts: What has been seen of it.
    """

    address: str
    state: LinkState
    num_queued_tokens: int
    counts: LinkCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class IntakeGauges:
    """The side that takes prompts.

    Attributes:
        prefills: All of them.
        prompts_by_outcome: Prompts that were asked for, by what became of them.
        wait_s: Seconds from asking to arrival, of all that arrived.
    """

    prefills: tuple[PrefillGauges, ...]
    prompts_by_outcome: dict[str, int]
    wait_s: float

    def series(self) -> Iterator[tuple[str, Series]]:
        """Give the values of its metrics by name and labels."""
        yield "prefill_prompts", {(outcome,): count for outcome, count in self.prompts_by_outcome.items()}
        yield "prefill_wait_seconds", {(): self.wait_s}
        each = [(prefill.address, prefill, prefill.counts) for prefill in self.prefills]
        yield (
            "prefill_state",
            {(address, state): float(prefill.state is state) for address, prefill, _ in each for state in LinkState},
        )
        yield "prefill_queued_tokens", {(address,): prefill.num_queued_tokens for address, prefill, _ in each}
        yield (
            "prefill_transfers",
            {
                (address, outcome): count
                for address, _, counts in each
                for outcome, count in (
                    ("started", counts.num_started),
                    ("arrived", counts.num_arrived),
                    ("failed", counts.num_failed),
                )
            },
        )
        yield "prefill_connections", {(address,): counts.num_connections for address, _, counts in each}
        yield "prefill_prompt_tokens", {(address,): counts.num_prompt_tokens for address, _, counts in each}
        yield "prefill_cached_tokens", {(address,): counts.num_cached_tokens for address, _, counts in each}
        yield "prefill_stale_messages", {(address,): counts.num_stale for address, _, counts in each}


@dataclass(frozen=True, kw_only=True, slots=True)
class DoorGauges:
    """The side that gives prompts.

    Attributes:
        num_groups: Decode groups whose line is up.
        num_running: Transfers that are neither complete nor failed.
        counts: What was sent.
    """

    num_groups: int
    num_running: int
    counts: OutgoingCounts = field(default_factory=OutgoingCounts)

    def series(self) -> Iterator[tuple[str, Series]]:
        """Give the values of its metrics by name and labels."""
        counts = self.counts
        yield "decode_groups", {(): self.num_groups}
        yield "transfers_running", {(): self.num_running}
        outcomes = {"started": counts.num_started, "done": counts.num_done, "failed": counts.num_failed}
        yield "transfers", {(outcome,): count for outcome, count in outcomes.items()}
        yield "transfer_prompt_tokens", {(): counts.num_prompt_tokens}
        yield "transfer_cached_tokens", {(): counts.num_cached_tokens}
        yield "transfer_stale_messages", {(): counts.num_stale}
        paths = [((str(source), str(to), kind), path) for (source, to, kind), path in counts.paths.items()]
        yield "transfer_bytes", {labels: path.num_bytes for labels, path in paths}
        yield "transfer_descriptors", {labels: path.num_descriptors for labels, path in paths}
        yield (
            "transfer_seconds",
            {
                (*labels, phase): seconds
                for labels, path in paths
                for phase, seconds in (("queued", path.queued_s), ("sending", path.sending_s))
            },
        )


def read_intake(intake: Intake) -> IntakeGauges:
    """Read the side that takes; to be called by the thread that runs the rounds."""
    counts = intake.counts
    return IntakeGauges(
        prefills=tuple(
            PrefillGauges(
                address=link.address,
                state=link.state,
                num_queued_tokens=link.num_tokens,
                counts=replace(link.counts),
            )
            for link in intake.links
        ),
        prompts_by_outcome={
            "received": counts.num_received,
            "lost": counts.num_lost,
            "abandoned": counts.num_abandoned,
        },
        wait_s=counts.wait_s,
    )


def read_door(prefill: PrefillServer) -> DoorGauges:
    """Read the side that gives; to be called by the thread that runs the rounds."""
    counts = prefill.counts
    return DoorGauges(
        num_groups=prefill.num_groups,
        num_running=prefill.num_running,
        counts=replace(counts, paths={path: replace(each) for path, each in counts.paths.items()}),
    )
