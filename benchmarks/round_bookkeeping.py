"""Host time of a round that is not model time: schedule, allocate, lay out the next inputs, commit.

Run: python benchmarks/round_bookkeeping.py [--json]. Targets: 50 us at 32 running requests, 150 us at 256.
"""

import argparse
import json
import statistics
import time

import numpy as np

from specdec.commit import commit
from specdec.dcp.allocator import PageAllocator
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.metadata import build_metadata
from specdec.draft import Drafts
from specdec.finish import FinishRule, OutputJudge
from specdec.request import Request, RequestUpdate
from specdec.round_rows import lay_out_rows
from specdec.sampling_params import SamplingParams
from specdec.sampling_rows import RequestSampling
from specdec.scheduler import Scheduler
from specdec.slot_table import SlotTable

PAGE_SIZE = 64
NUM_DRAFTS = 3
PROMPT_LENGTH = 1000
MAX_MODEL_LEN = 16384
NUM_ROUNDS = 400
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


def measure(num_requests: int) -> dict[str, float]:
    """Time rounds of `num_requests` decoding requests; median and 90th percentile in microseconds."""
    pages_per_request = MAX_MODEL_LEN // PAGE_SIZE
    num_pages = num_requests * pages_per_request
    slots = SlotTable(
        num_slots=num_requests, max_model_len=MAX_MODEL_LEN, max_draft_tokens=NUM_DRAFTS, page_size=PAGE_SIZE
    )
    allocator = PageAllocator(num_pages, 1)
    scheduler = Scheduler(
        slots, allocator, None, num_draft_tokens=NUM_DRAFTS, prefill_chunk_tokens=num_requests * PROMPT_LENGTH
    )
    scheduler.waiting.extend(make_request(request_id) for request_id in range(num_requests))
    geometry = Geometry(1, 0, PoolRole.TARGET)
    generator = np.random.default_rng(0)
    times_us: list[float] = []
    for round_number in range(NUM_ROUNDS):
        drafts_BK = generator.integers(0, 50_000, (num_requests, NUM_DRAFTS))
        emitted_BK1 = generator.integers(0, 50_000, (num_requests, NUM_DRAFTS + 1))
        num_accepted_B = generator.integers(0, NUM_DRAFTS + 1, num_requests)
        start = time.perf_counter()
        batch = scheduler.schedule()
        if batch is None:
            raise RuntimeError("the benchmark ran out of requests: raise MAX_MODEL_LEN")
        rows = lay_out_rows(batch, Drafts(token_id_BK=drafts_BK, num_drafts_B=batch.num_drafts_B), slots)
        build_metadata(
            geometry=geometry,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            request_index=rows.request_index_T,
            position=rows.position_T,
            page_table=rows.page_id_BP,
        )
        slots.computed_S[batch.slot_B] += batch.num_known_B
        commit(
            slots,
            slot_F=batch.slot_B,
            token_id_FK1=emitted_BK1,
            num_accepted_F=np.minimum(num_accepted_B, batch.num_drafts_B),
            num_drafts_F=batch.num_drafts_B,
        )
        if round_number > NUM_ROUNDS // 10:  # the first rounds are prefill and warm-up
            times_us.append((time.perf_counter() - start) * 1e6)
    return {"median_us": statistics.median(times_us), "p90_us": sorted(times_us)[len(times_us) * 9 // 10]}


def main() -> None:
    """Measure 1, 32 and 256 running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    results = {num_requests: measure(num_requests) for num_requests in TARGET_US}
    if as_json:
        print(json.dumps(results))
        return
    for num_requests, result in results.items():
        target = TARGET_US[num_requests]
        goal = "" if target is None else f"   target {target:.0f} us"
        print(f"{num_requests:4d} requests: {result['median_us']:7.1f} us a round (p90 {result['p90_us']:.1f}){goal}")


if __name__ == "__main__":
    main()
