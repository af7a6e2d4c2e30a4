"""What an engine says about itself, read between two rounds."""

from dataclasses import dataclass, field

from specdec.core import EngineCore
from specdec.dcp.merge_clock import MergeTime
from specdec.dcp.shard_balance import ShardBalance, shard_balance
from specdec.engine import Engine
from specdec.prefill.server import PrefillServer
from specdec.request import SpeculationStats
from specdec.serving.handoff_gauges import DoorGauges, IntakeGauges, read_door, read_intake


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineGauges:
    """The state of an engine, and counts since it was made.

    Attributes:
        num_running: Choices that hold a slot.
        num_waiting: Choices that wait for one.
        num_pages: KV pages of the pool.
        num_free_pages: Pages that nobody holds.
        num_cached_pages: Pages that are only kept for later prompts, and given up when others need them.
        num_quarantined_pages: Pages that nobody uses but somebody may still write to.
        num_preemptions: How often a running choice's pages were taken away.
        speculation: How drafting went.
        num_audited_decisions: Decisions of every rank that were compared with the first rank's.
        disagreements_by_rank: Those that differed, by rank; empty where nothing is compared.
        shards: How the target KV of running choices lies on the dcp ranks; None where there is one.
        merges: Of partial attention, as the first rank has timed them; None where there is one dcp rank.
        intake: The side of a hand-off that takes prompts; None without prefills.
        door: The side that gives them; None where nobody may call.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_quarantined_pages: int = 0
    num_preemptions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_audited_decisions: int = 0
    disagreements_by_rank: tuple[int, ...] = ()
    shards: ShardBalance | None = None
    merges: MergeTime | None = None
    intake: IntakeGauges | None = None
    door: DoorGauges | None = None


def read_gauges(engine: Engine, prefill: PrefillServer | None = None) -> EngineGauges:
    """Read an engine, and what serves decode groups with it; to be called by the thread that runs the rounds."""
    core, intake = engine.core, engine.intake
    scheduler, audit = core.scheduler, core.audit
    has_shards = core.ranks.worker.groups.dcp.size > 1
    return EngineGauges(
        num_running=scheduler.slots.num_active,
        num_waiting=len(scheduler.waiting),
        num_pages=scheduler.allocator.num_pages,
        num_free_pages=scheduler.allocator.num_free,
        num_cached_pages=scheduler.num_available_pages() - scheduler.allocator.num_free,
        num_quarantined_pages=0 if intake is None else intake.counts.num_held_pages,
        num_preemptions=scheduler.num_preemptions,
        speculation=scheduler.slots.speculation(),
        num_audited_decisions=0 if audit is None else audit.num_decisions,
        disagreements_by_rank=() if audit is None else tuple(audit.disagreements_N.tolist()),
        shards=_read_shards(core) if has_shards else None,
        merges=core.ranks.worker.groups.merge_clock.read() if has_shards else None,
        intake=None if intake is None else read_intake(intake),
        door=None if prefill is None else read_door(prefill),
    )


def _read_shards(core: EngineCore) -> ShardBalance:
    slots = core.slots  # free ones hold no pages and no tokens
    return shard_balance(
        slots.page_id_SP[:, : slots.num_pages_S.max()],
        slots.computed_S,
        page_size=slots.page_size,
        dcp_size=core.ranks.worker.groups.dcp.size,
    )
