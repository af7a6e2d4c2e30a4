"""What a round that was started emits, on its way to the host.

B = places of the round, Q = rows of a request, n = requests that take part.
"""

from dataclasses import dataclass

import torch

from specdec.device.decode_task import Decoded
from specdec.kernels.commit_runs import CommittedRuns


@dataclass(frozen=True, kw_only=True, slots=True)
class EmittedIds:
    """What a round emitted, in memory of the host, to be read once it `is_done`.

    Attributes:
        token_id_BQ: i64, -1 behind the last of a request.
        drawable_B: bool; False where a request must fail.
        is_done: Recorded behind the copy; None where nothing needs to be waited for.
    """

    token_id_BQ: torch.Tensor
    drawable_B: torch.Tensor
    is_done: torch.cuda.Event | None = None

    @classmethod
    def pinned(cls, runs: CommittedRuns) -> "EmittedIds":
        """Give memory that a GPU copies to while the host goes on."""
        return cls(
            token_id_BQ=torch.empty(runs.emitted_BQ.shape, dtype=torch.int64, pin_memory=True),
            drawable_B=torch.empty(runs.drawable_B.shape, dtype=torch.bool, pin_memory=True),
            is_done=torch.cuda.Event(),
        )

    @classmethod
    def copied(cls, runs: CommittedRuns) -> "EmittedIds":
        """Copy what a round gave; waits for it."""
        return cls(token_id_BQ=runs.emitted_BQ.cpu().clone(), drawable_B=runs.drawable_B.cpu().clone())

    def take(self, runs: CommittedRuns) -> None:
        """Copy what the round gives that was started last on the current stream; does not wait."""
        assert self.is_done is not None
        self.token_id_BQ.copy_(runs.emitted_BQ, non_blocking=True)
        self.drawable_B.copy_(runs.drawable_B, non_blocking=True)
        self.is_done.record()

    def wait(self) -> None:
        """Wait until it is there."""
        if self.is_done is not None:
            self.is_done.synchronize()


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRound:
    """A round that may still run.

    Attributes:
        emitted: What it emits, of all its places.
        num_requests: n.
    """

    emitted: EmittedIds
    num_requests: int

    def decoded(self) -> Decoded:
        """Wait for the round; gives what it emitted."""
        self.emitted.wait()
        return Decoded(
            token_id_BQ=self.emitted.token_id_BQ[: self.num_requests].numpy().copy(),
            drawable_B=self.emitted.drawable_B[: self.num_requests].numpy().copy(),
        )
