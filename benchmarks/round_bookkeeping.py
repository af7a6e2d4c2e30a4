"""Host time of a round that is not model time: schedule and allocate, lay out the rows, place them in the pool, commit.

Run: python benchmarks/round_bookkeeping.py [--json] [--dcp-size N]. Targets on one rank: 50 us at 32 running requests,
150 us at 256. All requests draft 3 tokens and keep 0 to 3 of them; pages of 64 tokens are allocated as they grow.
"""

import argparse
import json
import time

import numpy as np
import numpy.typing as npt
import torch

from specdec.commit import commit
from specdec.dcp.allocator import PageAllocator
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.metadata import place_rows
from specdec.dcp.page_table import KeptPageTable
from specdec.drafting.draft import Drafts
from specdec.request import Request, RequestUpdate
from specdec.round_rows import lay_out_rows
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.scheduler import Scheduler
from specdec.slot_table import SlotTable

PAGE_SIZE = 64
NUM_DRAFTS = 3
PROMPT_LENGTH = 1000
MAX_MODEL_LEN = 16384
NUM_ROUNDS = 400
NUM_WARMUP_ROUNDS = 40  # the first is prefill
NUM_REPETITIONS = 5  # the best counts: other work on the machine only ever adds
PARTS = ("schedule", "lay out", "place", "commit")
TARGET_US = {1: None, 32: 50.0, 256: 150.0}


def make_request(request_id: int) -> Request:
    """A decoding request with the usual stop ids and no other rule."""
    params = SamplingParams(seed=request_id)
    prompt_ids = np.arange(PROMPT_LENGTH, dtype=np.int64)
    rule = FinishRule.of(params, eos_token_ids=(60_000, 60_001, 60_002), max_tokens=MAX_MODEL_LEN - PROMPT_LENGTH)

    def ignore(update: RequestUpdate) -> None:
        del update

    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        params=params,
        choice_index=0,
        limit=MAX_MODEL_LEN,
        stop_ids=rule.stop_ids,
        sampling=RequestSampling(params, choice=0, prompt_ids=[1], stop_ids=rule.stop_ids, vocab_size=65_536),
        judge=OutputJudge(params, rule, None),
        on_update=ignore,
    )


@torch.inference_mode()  # as the engine runs its rounds
def time_rounds(num_requests: int, *, dcp_size: int) -> npt.NDArray[np.float64]:
    """Time each part of each round of `num_requests` decoding requests, in microseconds: [rounds, parts]."""
    num_pages = -(-num_requests * MAX_MODEL_LEN // (PAGE_SIZE * dcp_size))
    slots = SlotTable(
        num_slots=num_requests, max_model_len=MAX_MODEL_LEN, max_draft_tokens=NUM_DRAFTS, page_size=PAGE_SIZE
    )
    allocator = PageAllocator(num_pages, dcp_size)
    scheduler = Scheduler(
        slots, allocator, None, num_draft_tokens=NUM_DRAFTS, prefill_chunk_tokens=num_requests * PROMPT_LENGTH
    )
    scheduler.waiting.add(*map(make_request, range(num_requests)))
    geometry = Geometry(dcp_size, 0, PoolRole.TARGET)
    page_table = KeptPageTable(geometry=geometry, page_size=PAGE_SIZE, num_pages=num_pages)
    generator = np.random.default_rng(0)
    times_us = []
    for _ in range(NUM_ROUNDS):
        drafts_BK = generator.integers(0, 50_000, (num_requests, NUM_DRAFTS))
        emitted_BK1 = generator.integers(0, 50_000, (num_requests, NUM_DRAFTS + 1))
        num_accepted_B = generator.integers(0, NUM_DRAFTS + 1, num_requests)
        marks = [time.perf_counter()]
        batch = scheduler.schedule()
        if batch is None:
            raise RuntimeError("the benchmark ran out of requests: raise MAX_MODEL_LEN")
        marks.append(time.perf_counter())
        rows = lay_out_rows(batch, Drafts(token_id_BK=drafts_BK, num_drafts_B=batch.num_drafts_B), slots)
        marks.append(time.perf_counter())
        place_rows(page_table.of(rows.page_id_BP), request_index=rows.request_index_T, position=rows.position_T)
        marks.append(time.perf_counter())
        slots.computed_S[batch.slot_B] += batch.num_known_B
        commit(
            slots,
            slot_F=batch.slot_B,
            token_id_FK1=emitted_BK1,
            num_accepted_F=np.minimum(num_accepted_B, batch.num_drafts_B),
            num_drafts_F=batch.num_drafts_B,
        )
        marks.append(time.perf_counter())
        times_us.append(np.diff(marks) * 1e6)
    return np.array(times_us[NUM_WARMUP_ROUNDS:])


def measure(num_requests: int, *, dcp_size: int) -> dict[str, float]:
    """Microseconds a round: medians of the parts and of the whole, and its 90th percentile, of the best repetition."""
    runs = [time_rounds(num_requests, dcp_size=dcp_size) for _ in range(NUM_REPETITIONS)]
    best = min(runs, key=lambda times: float(np.median(times.sum(axis=1))))
    parts = zip(PARTS, np.median(best, axis=0).tolist(), strict=True)
    total = best.sum(axis=1)
    return {**dict(parts), "median": float(np.median(total)), "p90": float(np.percentile(total, 90))}


def main() -> None:
    """Measure 1, 32 and 256 running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dcp-size", type=int, default=1, help="ranks that share the pages of a request")
    arguments = parser.parse_args()
    results = {num_requests: measure(num_requests, dcp_size=arguments.dcp_size) for num_requests in TARGET_US}
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"us a round, dcp size {arguments.dcp_size}")
    print("requests", *(f"{name:>9}" for name in (*PARTS, "median", "p90", "target")))
    for num_requests, result in results.items():
        target = TARGET_US[num_requests] if arguments.dcp_size == 1 else None
        print(f"{num_requests:8d}", *(f"{value:9.1f}" for value in result.values()), f"{target or '-':>9}")


if __name__ == "__main__":
    main()
