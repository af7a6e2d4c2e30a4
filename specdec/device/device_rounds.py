"""The rounds of one rank that stay on the device: their requests, and a graph for each number of places.

B = places, Q = rows of a request, P = pages of a request, n = requests that take part.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.device.decode_round import DecodeRound
from specdec.device.decode_task import DecodeTask, Int64Array, Members
from specdec.device.round_graph import RoundGraph
from specdec.device.started_round import EmittedIds, StartedRound


class DeviceRounds:
    """Runs rounds of any number of requests up to the places there are.

    The next power of two of places takes part; those behind the requests hold nobody. Rounds in which all are greedy
    have graphs of their own, which write no logits.

    Args:
        decode_round: With all places.
    """

    def __init__(self, decode_round: DecodeRound) -> None:
        self._round = decode_round
        self._num_requests = 0
        self._all_greedy = True
        self._graphs: dict[tuple[int, bool], RoundGraph] = {}

    @property
    def num_places(self) -> int:
        """Most requests of a round."""
        return len(self._round.state.length_B)

    @property
    def num_draft_tokens(self) -> int:
        """K, which every round drafts where a request has room for as many."""
        return self._round.state.token_BQ.shape[1] - 1

    def capture(self) -> None:
        """Make graphs of all sizes, before any request takes part; from then on rounds are replayed, not launched."""
        memory = torch.cuda.graph_pool_handle()
        for num_places in reversed(self._sizes()):
            for is_greedy in (False, True):  # the largest first: the others fit into its memory
                part = self._of(num_places, is_greedy=is_greedy)
                self._graphs[num_places, is_greedy] = RoundGraph(part, memory=memory)

    def close(self) -> None:
        """Let go of the graphs: NCCL waits for those that hold a group's collectives before it ends the group."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def start(self, task: DecodeTask) -> StartedRound:
        """Take in what the task says and start a round, behind the one before; at most two may be unread."""
        if task.members is not None:
            self._take(task.members)
        if len(task.gained_U3):
            self._add_pages(task.gained_U3)
        num_places = next(size for size in self._sizes() if size >= self._num_requests)
        graph = self._graphs.get((num_places, self._all_greedy))
        if graph is not None:
            emitted = graph.replay()
        else:
            launched = self._of(num_places, is_greedy=self._all_greedy)
            launched.launch()
            emitted = EmittedIds.copied(launched.runs)
        return StartedRound(emitted=emitted, num_requests=self._num_requests)

    def _sizes(self) -> list[int]:
        """Numbers of places that there are graphs for, ascending."""
        powers = [1 << power for power in range(self.num_places.bit_length()) if 1 << power < self.num_places]
        return [*powers, self.num_places]

    def _of(self, num_places: int, *, is_greedy: bool) -> DecodeRound:
        part = self._round.of_requests(num_places)
        if is_greedy:
            part.noise = None
        return part

    def _take(self, members: Members) -> None:
        """Let these requests take part; a request that did before keeps its drafts."""
        state = self._round.state
        num_requests, num_pages = members.page_id_BP.shape
        rows_per_request = state.token_BQ.shape[1]
        on_device = self._on_device
        source_B = on_device(members.source_place_B)
        kept_BQ = state.token_BQ[source_B.clamp(min=0)]  # a copy: places may change with each other
        has_drafts_B = members.source_place_B >= 0
        num_drafts_B = np.minimum(members.limit_B - members.length_B - 1, rows_per_request - 1) * has_drafts_B
        state.token_BQ[:num_requests] = kept_BQ
        state.token_BQ[:num_requests, 0] = on_device(members.last_token_B)
        state.length_B[:num_requests] = on_device(members.length_B)
        state.limit_B[:num_requests] = on_device(members.limit_B)
        state.num_rows_B[:num_requests] = on_device(num_drafts_B + 1)
        state.num_rows_B[num_requests:] = 0
        page_BP = on_device(members.page_id_BP.clip(min=0).astype(np.int32))
        self._round.page_id_BP[:num_requests, :num_pages] = page_BP
        self._round.take_pages()
        noise = self._round.noise
        if noise is not None:
            noise.stream_key_B[:num_requests] = on_device(members.noise.stream_key_B.view(np.int64))
            noise.temperature_B[:num_requests] = on_device(members.noise.temperature_B)
            noise.greedy_B[:num_requests] = on_device(members.noise.greedy_B)
            noise.temperature_B[num_requests:] = 1
            noise.greedy_B[num_requests:] = True
        self._num_requests, self._all_greedy = num_requests, bool(members.noise.greedy_B.all())

    def _add_pages(self, gained_U3: Int64Array) -> None:
        place_U, column_U, page_U = self._on_device(gained_U3.T)
        self._round.page_id_BP[place_U, column_U] = page_U.int()
        self._round.take_pages()

    def _on_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy to the device, without a wait for the rounds that run there."""
        tensor, device = torch.from_numpy(np.ascontiguousarray(array)), self._round.state.length_B.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
