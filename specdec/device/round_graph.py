"""Rounds replayed as one CUDA graph: warmed up, captured and replayed over the same memory, in the same states.

The host's part of a round is one launch and, when it wants them, a look at the emitted ids, which the graph has copied
to memory that the host reads.
"""

from typing import NamedTuple

import nvtx
import torch

from specdec.device.decode_round import DecodeRound

_WARM_UPS = 2  # the first compiles and loads kernels, which a capture must not


class EmittedIds(NamedTuple):
    """What a round emitted, on the host.

    Attributes:
        token_id_BQ: i64, -1 behind the last of a request.
        drawable_B: bool; False where a request must fail.
    """

    token_id_BQ: torch.Tensor
    drawable_B: torch.Tensor


class RoundGraph:
    """A captured round.

    Args:
        decode_round: No place holds a request while it is captured: every row is padding, which reads and writes no
            KV.
    """

    def __init__(self, decode_round: DecodeRound) -> None:
        self._round = decode_round
        runs = decode_round.runs
        self._emitted = EmittedIds(
            torch.empty(runs.emitted_BQ.shape, dtype=torch.int64, pin_memory=True),
            torch.empty(runs.drawable_B.shape, dtype=torch.bool, pin_memory=True),
        )
        if bool(decode_round.state.num_rows_B.any()):
            raise ValueError("a round is captured while it holds no request, or their KV would be written anew")
        self._graph = torch.cuda.CUDAGraph()
        self._is_done = torch.cuda.Event()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._launch()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # Other threads, of a transport or of NCCL, go on with what this one must not do meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._launch()

    def replay(self) -> None:
        """Start the next round on the current stream."""
        with nvtx.annotate("round"):
            self._graph.replay()
            self._is_done.record()

    def emitted(self) -> EmittedIds:
        """Wait for the round that was started last; gives memory that the next one overwrites."""
        self._is_done.synchronize()
        return self._emitted

    def _launch(self) -> None:
        self._round.launch()
        for kept, given in zip(self._emitted, (self._round.runs.emitted_BQ, self._round.runs.drawable_B), strict=True):
            kept.copy_(given, non_blocking=True)
