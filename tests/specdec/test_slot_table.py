"""What the slot table keeps from round to round is what it would answer anew, whoever came and went."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.commit import commit
from specdec.dcp.allocator import PageAllocator
from specdec.dcp.geometry import Geometry, PoolRole
from specdec.dcp.metadata import place_rows
from specdec.dcp.page_table import KeptPageTable, build_page_table
from specdec.drafting.draft import Drafts
from specdec.request import Request
from specdec.round_rows import lay_out_rows
from specdec.sampling.finish import FinishRule, OutputJudge
from specdec.sampling.sampling_params import SamplingParams
from specdec.sampling.sampling_rows import RequestSampling
from specdec.scheduler import ScheduledBatch, Scheduler
from specdec.slot_table import Int64Array, SlotTable

NUM_SLOTS = 5
MAX_MODEL_LEN = 48
NUM_DRAFTS = 3
PAGE_SIZE = 4
VOCAB_SIZE = 200_000  # more than the low bits of an id that the stop check looks at first


def request_of(request_id: int, *, prompt_length: int, stop_ids: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(seed=request_id, stop_token_ids=stop_ids)
    rule = FinishRule.of(params, eos_token_ids=(), max_tokens=MAX_MODEL_LEN - prompt_length)
    return Request(
        request_id=request_id,
        prompt_ids=np.arange(prompt_length, dtype=np.int64),
        params=params,
        choice_index=0,
        limit=MAX_MODEL_LEN,
        stop_ids=rule.stop_ids,
        sampling=RequestSampling(params, choice=0, prompt_ids=[1], stop_ids=rule.stop_ids, vocab_size=VOCAB_SIZE),
        judge=OutputJudge(params, rule, None),
        on_update=lambda update: None,
    )


def new_slots() -> SlotTable:
    return SlotTable(num_slots=NUM_SLOTS, max_model_len=MAX_MODEL_LEN, max_draft_tokens=NUM_DRAFTS, page_size=PAGE_SIZE)


class Rounds:
    """Rounds of a scheduler without a model: drafts and tokens are drawn at will."""

    def __init__(self, *, num_pages: int, dcp_size: int, data: st.DataObject) -> None:
        self.data = data
        self.slots = new_slots()
        self.num_pages, self.dcp_size = num_pages, dcp_size
        self.scheduler = Scheduler(
            self.slots,
            PageAllocator(num_pages, dcp_size),
            None,
            num_draft_tokens=NUM_DRAFTS,
            prefill_chunk_tokens=7,
        )
        self.page_tables = [
            KeptPageTable(geometry=geometry, page_size=PAGE_SIZE, num_pages=num_pages) for geometry in self.geometries
        ]

    @property
    def geometries(self) -> list[Geometry]:
        return [Geometry(self.dcp_size, rank, PoolRole.TARGET) for rank in range(self.dcp_size)]

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            return
        drafts = Drafts(
            token_id_BK=self.token_ids(len(batch.slot_B), NUM_DRAFTS),
            num_drafts_B=self.up_to(batch.num_drafts_B),
        )
        self.check(batch, drafts)
        self.slots.computed_S[batch.slot_B] += batch.num_known_B
        final = np.flatnonzero(batch.final_B)
        num_drafts_F = drafts.num_drafts_B[final]
        committed = commit(
            self.slots,
            slot_F=batch.slot_B[final],
            token_id_FK1=self.token_ids(len(final), NUM_DRAFTS + 1),
            num_accepted_F=self.up_to(num_drafts_F),
            num_drafts_F=num_drafts_F,
        )
        for slot in committed.slot_F[committed.ended_F].tolist():
            self.scheduler.finish(slot, num_refreshed=0)

    def check(self, batch: ScheduledBatch, drafts: Drafts) -> None:
        """Compare the rows of a round and where they lie with loops over requests."""
        slots = self.slots
        rows = lay_out_rows(batch, drafts, slots)
        expected_rows = []
        for b, slot in enumerate(batch.slot_B.tolist()):
            known = slots.token_SX[slot, : slots.length_S[slot]].tolist()
            start, num_known = int(batch.start_B[b]), int(batch.num_known_B[b])
            tokens = known[start : start + num_known] + drafts.token_id_BK[b, : drafts.num_drafts_B[b]].tolist()
            expected_rows += [(b, place, start + place, token) for place, token in enumerate(tokens)]
        found = np.stack((rows.request_index_T, rows.rank_T, rows.position_T, rows.token_id_T), axis=1)
        assert found.tolist() == [list(row) for row in expected_rows]

        page_ids = [slots.pages(slot) for slot in batch.slot_B.tolist()]
        most = max(map(len, page_ids))
        assert rows.page_id_BP.tolist() == [held + [-1] * (most - len(held)) for held in page_ids]
        for geometry, page_table in zip(self.geometries, self.page_tables, strict=True):
            fresh = build_page_table(
                rows.page_id_BP.copy(), geometry=geometry, page_size=PAGE_SIZE, num_pages=self.num_pages
            )
            placed, expected = (
                place_rows(table, request_index=rows.request_index_T, position=rows.position_T)
                for table in (page_table.of(rows.page_id_BP), fresh)
            )
            assert placed.write_row_T.tolist() == expected.write_row_T.tolist()
            assert placed.local_page_RP.tolist() == expected.local_page_RP.tolist()
            assert placed.max_context == expected.max_context
        assert slots.requests_at(batch.slot_B) == tuple(slots.requests[slot] for slot in batch.slot_B)

    def token_ids(self, num_rows: int, num_columns: int) -> Int64Array:
        return np.random.default_rng(self.data.draw(st.integers(0, 2**32))).integers(0, 200, (num_rows, num_columns))

    def up_to(self, most: Int64Array) -> Int64Array:
        return np.array([self.data.draw(st.integers(0, int(count))) for count in most], dtype=np.int64)


@settings(max_examples=60)
@given(data=st.data(), dcp_size=st.sampled_from([1, 2, 8]))
def test_rounds_are_laid_out_and_placed_as_if_nothing_were_kept(data: st.DataObject, dcp_size: int) -> None:
    num_pages = -(-data.draw(st.integers(MAX_MODEL_LEN // PAGE_SIZE + 1, 30)) // dcp_size)
    rounds = Rounds(num_pages=num_pages, dcp_size=dcp_size, data=data)
    for request_id in range(data.draw(st.integers(2, 25))):
        match data.draw(st.sampled_from(["add", "step", "step", "step", "preempt", "finish"])):
            case "add":
                request = request_of(
                    request_id,
                    prompt_length=data.draw(st.integers(1, 20)),
                    stop_ids=tuple(data.draw(st.lists(st.integers(0, 199), max_size=3))),
                )
                rounds.scheduler.waiting.add(request)
            case "step":
                rounds.step()
            case leave:
                active = np.flatnonzero(rounds.slots.active_S).tolist()
                if active and leave == "preempt":
                    rounds.scheduler.preempt(data.draw(st.sampled_from(active)))
                elif active:
                    rounds.scheduler.finish(data.draw(st.sampled_from(active)), num_refreshed=0)


def test_page_ids_are_one_array_until_pages_come_or_go() -> None:
    slots = new_slots()
    for slot in range(2):
        slots.admit(slot, request_of(slot, prompt_length=3), pages=[slot], num_cached=0)
    first = slots.page_ids(np.array([1, 0]))
    assert slots.page_ids(np.array([1, 0])) is first
    assert not first.flags.writeable
    slots.append_pages(0, [7])
    assert first.tolist() == [[1], [0]]
    assert slots.page_ids(np.array([1, 0])).tolist() == [[1, -1], [0, 7]]
    slots.release(0)
    slots.admit(0, request_of(2, prompt_length=3), pages=[9], num_cached=0)
    assert slots.page_ids(np.array([1, 0])).tolist() == [[1], [9]]


def test_a_slot_taken_again_gives_its_new_request() -> None:
    slots = new_slots()
    first, second = (request_of(index, prompt_length=3) for index in range(2))
    slots.admit(0, first, pages=[0], num_cached=0)
    assert slots.requests_at(np.array([0])) == (first,)
    slots.release(0)
    slots.admit(0, second, pages=[0], num_cached=0)
    assert slots.requests_at(np.array([0])) == (second,)


def test_no_stop_id_is_missed_and_ids_of_requests_that_left_are_forgotten() -> None:
    slots = new_slots()
    stop_ids = (0, 7, 150_000, 2**40)
    for slot in range(2):
        slots.admit(slot, request_of(slot, prompt_length=3, stop_ids=stop_ids[slot::2]), pages=[slot], num_cached=0)
    for stop_id in stop_ids:
        assert slots.may_stop(np.array([[1, -1, 2, stop_id]]))
    assert not slots.may_stop(np.array([[1, -1, 2, 150_001]]))
    slots.release(1)
    assert not slots.may_stop(np.array([[7, 2**40 + 1]]))
    assert slots.may_stop(np.array([[150_000]]))
