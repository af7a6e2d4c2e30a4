"""Rounds replayed as one CUDA graph: warmed up, captured and replayed over the same memory, in the same states.

The host's part of a round is one launch, and the copy of the emitted ids to memory that it reads.
"""

import itertools
from typing import TYPE_CHECKING

import nvtx
import torch

from specdec.device.decode_round import DecodeRound
from specdec.device.started_round import EmittedIds

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_WARM_UPS = 2  # the first compiles and loads kernels, which a capture must not
_NUM_STARTED = 2  # rounds that may run or wait to be read at the same time


class RoundGraph:
    """A captured round.

    Args:
        decode_round: No place holds a request while it is captured: every row is padding, which reads and writes no
            KV.
        memory: Pool that the graph allocates from, shared with graphs that never run at the same time; None makes one.
    """

    def __init__(self, decode_round: DecodeRound, *, memory: "_POOL_HANDLE | None" = None) -> None:
        self._round = decode_round
        self._emitted = itertools.cycle([EmittedIds.pinned(decode_round.runs) for _ in range(_NUM_STARTED)])
        if bool(decode_round.state.num_rows_B.any()):
            raise ValueError("a round is captured while it holds no request, or their KV would be written anew")
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                decode_round.launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # Other threads, of a transport or of NCCL, go on with what this one must not do meanwhile.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            decode_round.launch()

    def close(self) -> None:
        """Let go of the graph; rounds that were started end first."""
        self._graph.reset()

    def replay(self) -> EmittedIds:
        """Start the next round on the current stream.

        What it emits must be read before the second round after it is started, which takes the same memory.
        """
        with nvtx.annotate("round"):
            self._graph.replay()
            emitted = next(self._emitted)
            emitted.take(self._round.runs)
        return emitted
