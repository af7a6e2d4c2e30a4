"""Long prompts, short prompts and running streams share the rounds; counted in rounds, not in seconds."""

import pytest

from specdec.request import Request
from specdec.scheduler import ScheduledBatch, Scheduler
from tests.support.engines import Ask, Checkpoints, CoreRun, drawn, greedy, prompt_of

CHUNK = 16
NUM_DRAFT_TOKENS = 2


@pytest.fixture
def run(checkpoints: Checkpoints) -> CoreRun:
    return CoreRun(
        checkpoints.load("long"),
        num_draft_tokens=NUM_DRAFT_TOKENS,
        prefill_chunk_tokens=CHUNK,
        max_model_len=1000,
        page_size=16,
        max_num_requests=6,
        prefix_cache=False,
    )


def num_rounds_to_first_token(run: CoreRun, request: Request) -> int:
    num_rounds = 0
    while not run.updates[request.request_id]:
        assert run.step()
        num_rounds += 1
    return num_rounds


def test_streams_get_tokens_in_every_round_beside_a_long_prompt(run: CoreRun, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[ScheduledBatch] = []
    schedule = Scheduler.schedule

    def recorded(scheduler: Scheduler) -> ScheduledBatch | None:
        batch = schedule(scheduler)
        if batch is not None:
            batches.append(batch)
        return batch

    streams = [run.add(Ask(prompt_of(3 + place), drawn(place, 400))) for place in range(3)]
    for stream in streams:
        run.step_until_decoding(stream)
    long = run.add(Ask(prompt_of(500), greedy(4)))
    monkeypatch.setattr(Scheduler, "schedule", recorded)
    num_before = [len(run.updates[stream.request_id]) for stream in streams]
    num_rounds = num_rounds_to_first_token(run, long)
    assert num_rounds == -(-500 // CHUNK)
    num_after = [len(run.updates[stream.request_id]) for stream in streams]
    assert num_after == [before + num_rounds for before in num_before]
    for batch in batches:
        num_rows_B = batch.num_known_B + batch.num_drafts_B
        assert num_rows_B[batch.prefill_B].sum() <= CHUNK
        assert (num_rows_B[~batch.prefill_B] <= NUM_DRAFT_TOKENS + 1).all()


@pytest.mark.parametrize("num_long", [1, 3])
def test_short_prompt_does_not_wait_for_long_ones_ahead_of_it(run: CoreRun, num_long: int) -> None:
    for place in range(num_long):
        run.add(Ask(prompt_of(500, seed=place), greedy(2)))
    for _ in range(3):
        run.step()
    short = run.add(Ask(prompt_of(CHUNK), greedy(2)))
    assert num_rounds_to_first_token(run, short) == 2  # half of each round is for it
    assert run.updates[0] == []


def test_long_prompt_goes_on_whatever_short_ones_arrive(run: CoreRun) -> None:
    long = run.add(Ask(prompt_of(160), greedy(2)))
    num_rounds = 0
    while not run.updates[long.request_id]:
        run.add(Ask(prompt_of(CHUNK, seed=num_rounds), greedy(1)))
        assert run.step()
        num_rounds += 1
    assert num_rounds <= 2 * 160 // CHUNK


def test_outputs_are_those_of_plain_decoding_however_the_prompts_share_the_rounds(
    run: CoreRun, checkpoints: Checkpoints
) -> None:
    asks = [Ask(prompt_of(length, seed=place), greedy(6)) for place, length in enumerate((90, 40, 7, 33, 1, 64))]
    for place, ask in enumerate(asks):
        run.add(ask, priority=-(place % 3))
        run.step()
    plain = {"max_model_len": 1000}
    assert run.finish() == [checkpoints.plain(ask, "long", **plain) for ask in asks]
