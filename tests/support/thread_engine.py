"""A whole engine whose ranks are threads of this process: what a test can look into on every rank, and break.

The ranks load their shares, follow and exchange as processes do; only the control channel and the collectives are made
of queues and barriers. Tasks are pickled, as they are between processes.
"""

import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec.dcp.pool import KvPool
from specdec.drafting.draft import DraftSource
from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import CollectiveError, RankLostError
from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.parameters import TensorParallel
from specdec.ranks.follower import serve as follow
from specdec.ranks.leader_channel import RankLoss, Task
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_setup import build_worker
from specdec.ranks.worker import Worker
from specdec.result import GenerationResult
from specdec.text.tokenizer import Tokenizer
from tests.support.engines import Ask, Checkpoints, CoreRun, serve
from tests.support.thread_ranks import ThreadGroups

T = TypeVar("T")
_JOIN_TIMEOUT_S = 30


class ThreadChannel:
    """The leader's end of a control channel to threads, with what `Ranks` asks of `LeaderChannel`."""

    def __init__(self, groups: ThreadGroups, *, num_followers: int) -> None:
        self.followers = [ThreadTasks() for _ in range(num_followers)]
        self.loss: RankLoss | None = None
        self.sent: list[str] = []
        self._groups = groups
        self._lock = threading.Lock()

    def broadcast(self, task: Task) -> None:
        self.check()
        self.sent.append(task.method)
        message = pickle.dumps(task)
        for follower in self.followers:
            follower.messages.put(message)

    def check(self) -> None:
        if self.loss is not None:
            raise RankLostError(f"rank {self.loss.rank} is gone: {self.loss.cause}")

    def ending_soon(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cause_of(self, error: BaseException) -> RankLostError:
        return RankLostError(str(self.loss or error))

    def lose(self, rank: int, cause: str, *, is_consequence: bool = False) -> None:
        with self._lock:
            if self.loss is None and not is_consequence:
                self.loss = RankLoss(rank, cause)
        self._groups.abort()

    def close(self) -> None:
        for follower in self.followers:
            follower.messages.put(None)


class ThreadTasks:
    """A follower's end: tasks as bytes, None at the end."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def next_task(self) -> Task | None:
        message = self.messages.get()
        if message is None:
            return None
        task: Task = pickle.loads(message)
        return task


class ThreadEngine:
    """Ranks as threads, and what an engine above them needs.

    Attributes:
        config: The settings.
        workers: Of every rank, the leader's first.
        ranks: What the leader runs passes with.
        channel: The leader's end of the control channel.
    """

    def __init__(self, shares: Sequence[LoadedCheckpoint], config: EngineConfig, *, with_draft: bool) -> None:
        self.config = config
        self._checkpoint = shares[0]
        self._engines: list[Engine] = []
        self._groups = ThreadGroups(tp_size=config.tp_size, dcp_size=config.dcp_size, cp_size=config.cp_size)
        self.workers = [
            build_worker(share, config, with_draft=with_draft, parallel=groups)
            for share, groups in zip(shares, self._groups.ranks, strict=True)
        ]
        self.channel = ThreadChannel(self._groups, num_followers=config.num_ranks - 1)
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, worker, tasks), name=f"rank {rank}", daemon=True)
            for rank, (worker, tasks) in enumerate(zip(self.workers[1:], self.channel.followers, strict=True), start=1)
        ]
        for thread in self._threads:
            thread.start()
        channel: Any = self.channel  # stands in for a `LeaderChannel`
        self.ranks = Ranks(self.workers[0], channel)

    def engine(self, *, draft_source: DraftSource | None = None, tokenizer: Tokenizer | None = None) -> Engine:
        """An engine that works with token ids, and with text where it is given a tokenizer."""
        engine = Engine(self._checkpoint, self.config, draft_source=draft_source, tokenizer=tokenizer, ranks=self.ranks)
        self._engines.append(engine)  # one that is dropped would end the ranks
        return engine

    def core_run(self, *, draft_source: DraftSource | None = None) -> CoreRun:
        """The rounds, one by one."""
        settings = {name: getattr(self.config, name) for name in EngineConfig.__dataclass_fields__}
        return CoreRun(self._checkpoint, draft_source=draft_source, ranks=self.ranks, **settings)

    def on_every_rank(self, function: Callable[[Worker], T]) -> list[T]:
        """Call a function with each rank's worker, in a thread each, while the engine does nothing."""
        return self._groups.run(lambda rank: function(self.workers[rank]))

    @property
    def pools(self) -> list[KvPool]:
        """All pools of all ranks."""
        drafts = [worker.draft.pool for worker in self.workers if worker.draft is not None]
        return [worker.pool for worker in self.workers] + drafts

    def poison(self) -> None:
        """Fill all KV memory of all ranks with NaN, so that a row that was never written shows."""
        for pool in self.pools:
            for entry in pool.layout.entries:
                pool.buffer(entry.kind).fill_(0xFF)

    def close(self) -> None:
        """End the followers; fails where one does not end."""
        self.ranks.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        self._groups.abort()
        if alive:
            raise AssertionError(f"these did not end: {alive}")

    def _follow(self, rank: int, worker: Worker, tasks: ThreadTasks) -> None:
        try:
            follow(worker, tasks)
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            self.channel.lose(rank, cause, is_consequence=isinstance(error, CollectiveError))


class ThreadEngines:
    """Makes engines of thread ranks from checkpoints whose shares are loaded once."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._shares: dict[tuple[object, ...], list[LoadedCheckpoint]] = {}
        self._plain: dict[tuple[str, ...], list[GenerationResult]] = {}

    @contextmanager
    def open(
        self,
        model: str | Path = "parallel",
        *,
        tp_size: int,
        dcp_size: int,
        dtype: torch.dtype = torch.float32,
        with_draft: bool | None = None,
        **settings: Any,
    ) -> Iterator[ThreadEngine]:
        """An engine over a checkpoint; it ends with the `with` block.

        Args:
            model: Name of a checkpoint of `Checkpoints`, or the directory of any other.
            tp_size: Ranks.
            dcp_size: Ranks that share target pages.
            dtype: Of the parameters.
            with_draft: Whether the ranks hold the MTP layer; None where drafts are wanted.
            settings: Fields of `EngineConfig`.
        """
        config = EngineConfig(
            **{"page_size": 4, "max_model_len": 128, **settings, "tp_size": tp_size, "dcp_size": dcp_size}
        )
        shares = self._shares_of(model, dtype, tp_size=tp_size, expert_split=config.expert_split) * config.cp_size
        with_draft = config.num_draft_tokens > 0 if with_draft is None else with_draft
        running = ThreadEngine(shares, config, with_draft=with_draft)
        try:
            yield running
        finally:
            running.close()

    def plain(self, asks: Sequence[Ask], name: str = "parallel", **settings: Any) -> list[GenerationResult]:
        """What these ranks give for asks that run together without drafts, each prompt in one piece, nothing cached.

        Kept, so that each is computed once.
        """
        key = name, repr(asks), repr(sorted(settings.items(), key=str))
        if key not in self._plain:
            plain = {"num_draft_tokens": 0, "prefill_chunk_tokens": 2048, "prefix_cache": False}
            with self.open(name, **{**settings, **plain}) as running:
                self._plain[key] = serve(running.engine(), asks)
        return self._plain[key]

    def _shares_of(
        self, model: str | Path, dtype: torch.dtype, *, tp_size: int, expert_split: ExpertSplit | None
    ) -> list[LoadedCheckpoint]:
        key = model, dtype, tp_size, expert_split
        if key not in self._shares:
            path = model if isinstance(model, Path) else self._checkpoints.path(model)
            each = [TensorParallel(rank=rank, size=tp_size, expert_split=expert_split) for rank in range(tp_size)]
            self._shares[key] = [load_checkpoint(path, dtype=dtype, tensor_parallel=share) for share in each]
        return self._shares[key]
