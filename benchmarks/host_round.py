"""What the host does in a round that stays on the device: schedule, tell the device, commit, text, deliver.

Run: python benchmarks/host_round.py [--json]. The device is left out: every round is over at once, and of the 3 drafts
of a request it keeps 2. While a device works, the host does all this beside the next round
(`specdec.device_decoding`), so it costs time only where it takes longer than a round.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from specdec import Engine, SamplingParams
from specdec.device.decode_task import DecodeTask
from specdec.device.started_round import EmittedIds, StartedRound
from specdec.device_decoding import DeviceDecoding

NUM_DRAFTS = 3
NUM_KEPT = 2
NUM_ROUNDS = 200
NUM_WARMUP_ROUNDS = 20
NUM_REQUESTS = (1, 8, 32, 128)
MAX_MODEL_LEN = 1024  # holds the tokens of all rounds


class InstantRounds:
    """Rounds that take no time. Every request emits what it may, of ordinary tokens."""

    num_draft_tokens = NUM_DRAFTS

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._has_drafts_B = np.zeros(0, dtype=np.bool_)

    def close(self) -> None:
        """Nothing is kept."""

    def start(self, task: DecodeTask) -> StartedRound:
        """Emit a token of each request that has just come, and one behind each kept draft of the others."""
        if task.members is not None:
            self._has_drafts_B = task.members.source_place_B >= 0
        num_emitted_B = 1 + NUM_KEPT * self._has_drafts_B
        self._has_drafts_B = np.ones_like(self._has_drafts_B)
        is_emitted_BQ = np.arange(NUM_DRAFTS + 1) < num_emitted_B[:, None]
        emitted = EmittedIds(
            token_id_BQ=torch.from_numpy(np.where(is_emitted_BQ, 300, -1)),
            drawable_B=torch.ones(len(num_emitted_B), dtype=torch.bool),
        )
        return StartedRound(emitted=emitted, num_requests=len(num_emitted_B))


def measure(num_requests: int) -> float:
    """Microseconds of the host in a round: the median."""
    engine = Engine.from_pretrained(
        "glm-tiny", num_draft_tokens=NUM_DRAFTS, max_num_requests=num_requests, max_model_len=MAX_MODEL_LEN
    )
    with engine:
        core, rounds = engine.core, InstantRounds(num_requests)
        core.ranks.worker.device_rounds = rounds  # type: ignore[assignment]
        core._device = DeviceDecoding(core.ranks, core.scheduler, rounds)  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.8, max_tokens=MAX_MODEL_LEN - 16, ignore_eos=True)
        streams = [engine.stream(list(range(300, 308)), params) for _ in range(num_requests)]
        times_us = []
        for _ in range(NUM_WARMUP_ROUNDS + NUM_ROUNDS):
            start = time.perf_counter()
            engine.step()
            times_us.append((time.perf_counter() - start) * 1e6)
        for stream in streams:
            stream.close()
    return statistics.median(times_us[NUM_WARMUP_ROUNDS:])


def main() -> None:
    """Measure some numbers of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = {num_requests: measure(num_requests) for num_requests in NUM_REQUESTS}
    if arguments.json:
        print(json.dumps(results))
        return
    print("requests  us a round")
    for num_requests, microseconds in results.items():
        print(f"{num_requests:8d} {microseconds:11.0f}")


if __name__ == "__main__":
    main()
