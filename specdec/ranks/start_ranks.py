"""Bring up every rank of an engine: processes, groups, shares of the checkpoint."""

from collections.abc import Callable, Sequence

from specdec.errors import CollectiveError
from specdec.memory.kv_plan import plan_kv
from specdec.models.glm.checkpoint import CONFIG_NAME, LoadedCheckpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.parallel_sizes import check_parallel_sizes
from specdec.ranks.control_messages import Task
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_group import FOLLOWER_COMMAND, RankGroup
from specdec.ranks.rank_setup import RankSetup, load_rank


def start_ranks(
    setup: RankSetup,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    follower_command: Sequence[str] = FOLLOWER_COMMAND,
) -> tuple[LoadedCheckpoint, Ranks]:
    """Start the ranks of an engine, or meet those that a launcher started, and load every rank's share.

    Args:
        setup: For every rank; more than one.
        on_progress: Called with the bytes of this rank loaded so far, and those of all.
        follower_command: What to start as each follower, where no launcher has.

    Returns:
        This rank's share, and all ranks.

    Raises:
        ConfigError: The sizes do not fit each other or the model; nothing was started.
        RankError: A rank could not load its share; it names the rank and why.
        RankLostError: A rank did not come, or died.
    """
    config = setup.config
    model = GlmConfig.from_file(setup.directory / CONFIG_NAME)
    check_parallel_sizes(
        model,
        tp_size=config.tp_size,
        dcp_size=config.dcp_size,
        expert_split=config.expert_split,
    )
    plan_kv(model, config, dtype=str(setup.dtype), with_draft=setup.with_draft)  # refuses what no rank could allocate
    group = RankGroup(
        num_ranks=config.num_ranks,
        dcp_size=config.dcp_size,
        cp_size=config.cp_size,
        device=setup.device,
        timeout_s=config.rank_timeout_s,
        peer_memory=config.peer_memory,
        follower_command=follower_command,
    )
    try:
        group.channel.broadcast(Task("load", setup))
        checkpoint, worker = load_rank(
            setup, group.form(), device=group.place.device(setup.device), on_progress=on_progress
        )
        group.channel.await_loaded()
    except BaseException as failure:
        lost = group.channel.cause_of(failure) if isinstance(failure, CollectiveError) else None
        group.channel.lose(0, f"it could not start: {type(failure).__name__}: {failure}")  # they need not go on loading
        group.channel.close()
        group.close()
        if lost is not None:
            raise lost from failure
        raise
    return checkpoint, Ranks(worker, group.channel, on_close=group.close)
