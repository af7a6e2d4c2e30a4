"""What the rounds leave in the pools is what one pass over the known tokens would have written.

Rejected drafts and recycled hidden states leave no trace: the refresh rewrites every row that counts.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.geometry import PoolRole
from specdec.dcp.layout import KvFormat
from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.models.glm.indexer import Indexer
from specdec.models.glm.mtp import MTP_LAYER, MtpIndexSharing, MtpLayer
from specdec.models.glm.selection import Selection
from specdec.models.glm.target import GlmTarget
from specdec.request import Request
from tests.support.engines import (
    Ask,
    Checkpoints,
    CoreRun,
    RecordedDrafts,
    drawn,
    flipping_draft,
    greedy,
    kv_settings,
    prompt_of,
    script_of,
)
from tests.support.passes import OneRequest, run_target


def one_pass(checkpoints: Checkpoints, token_ids: tuple[int, ...], **settings: Any) -> tuple[CoreRun, Request]:
    """A fresh request for known tokens, computed in one pass, up to the token drawn after them."""
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, prefill_chunk_tokens=512, prefix_cache=False, **settings)
    request = run.add(Ask(token_ids, greedy(1 + len(token_ids))))
    run.step()
    return run, request


def assert_equal_rows(rows: tuple[torch.Tensor, ...], whole: tuple[torch.Tensor, ...]) -> None:
    for part, all_at_once in zip(rows, whole, strict=True):
        assert len(part) <= len(all_at_once)
        assert torch.equal(part, all_at_once[: len(part)])


def drafted_by_hand(
    checkpoint: LoadedCheckpoint, token_ids: tuple[int, ...], *, num_drafts: int, sharing: MtpIndexSharing
) -> tuple[list[int], tuple[torch.Tensor, torch.Tensor]]:
    """Greedy drafts that follow `token_ids`, and the draft rows of all but the last of these, by the definition.

    Row t is made of token t + 1 and the target's hidden state of token t; each further row of the last draft and g.
    """
    target = GlmTarget(checkpoint.config, checkpoint.parameters)
    mtp = MtpLayer(checkpoint.config, checkpoint.parameters, target, latent_norm_eps=None)
    num_rows = len(token_ids) - 1
    request = OneRequest(checkpoint.config, num_tokens=num_rows + num_drafts)
    ids_T = torch.tensor(token_ids)
    hidden_TH, _ = run_target(target, request, ids_T[:-1], chunks=[num_rows])
    metadata = request.metadata(request.draft_pool, range(num_rows))
    output = mtp.forward(pad_rows(ids_T[1:]), pad_rows(hidden_TH), metadata=metadata, pool=request.draft_pool)
    rows_T1 = metadata.rows_of(torch.arange(num_rows)[:, None])
    latent_TX = request.draft_pool.gather_latent(MTP_LAYER, rows_T1)[:, 0]
    key_TD = request.draft_pool.gather_index_keys(MTP_LAYER, metadata)[0, :num_rows]

    g_1H, anchor_1K = output.g_TH[num_rows - 1 : num_rows], output.selection.position_TK[-1:]
    drafts = [int(target.logits(g_1H).argmax())]
    for position in range(num_rows, num_rows + num_drafts - 1):
        metadata = request.metadata(request.draft_pool, [position])
        own_1K = torch.arange(num_rows, position + 1)[None]
        selection = {
            MtpIndexSharing.OFF: None,
            MtpIndexSharing.ANCHOR: Selection.of(anchor_1K, metadata),
            MtpIndexSharing.ANCHOR_AND_DRAFTS: Selection.of(torch.cat((anchor_1K, own_1K), dim=1), metadata),
        }[sharing]
        last_1 = pad_rows(torch.tensor(drafts[-1:]))
        output = mtp.forward(last_1, pad_rows(g_1H), metadata=metadata, pool=request.draft_pool, selection=selection)
        g_1H = output.g_TH[:1]
        drafts.append(int(target.logits(g_1H).argmax()))
    return drafts, (latent_TX, key_TD)


@pytest.mark.parametrize("num_prompt", [1, 2, 9, 20])
@pytest.mark.parametrize("sharing", list(MtpIndexSharing))
def test_draft_rows_and_drafts_of_every_round_are_those_of_the_definition(
    sharing: MtpIndexSharing, num_prompt: int, checkpoints: Checkpoints
) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=5, mtp_index_sharing=sharing, prefill_chunk_tokens=7)
    recorded = RecordedDrafts.of(run)
    request = run.add(Ask(prompt_of(num_prompt), greedy(40)))
    run.step_until_decoding(request)
    for _ in range(5):
        with torch.inference_mode():
            drafts, rows = drafted_by_hand(checkpoints.load(), run.known_ids(request), num_drafts=5, sharing=sharing)
        assert_equal_rows(run.kv(request, run.mtp_draft.pool, layer=MTP_LAYER), rows)
        run.step()
        assert recorded.token_ids[-1] == [drafts]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("sharing", list(MtpIndexSharing))
def test_rows_after_every_refresh_equal_those_of_one_pass(
    sharing: MtpIndexSharing, temperature: int, checkpoints: Checkpoints
) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, mtp_index_sharing=sharing)
    run.poison()
    params = drawn(4, 30) if temperature else greedy(30)
    request = run.add(Ask(prompt_of(10), params))
    run.step()
    num_runs_kept = 0
    while run.step() and request.slot is not None:
        known_ids = run.known_ids(request)
        num_runs_kept += len(run.updates[0][-1].token_ids) > 1
        # Row t is made of token t + 1, so the row of the last but one known token is the last.
        whole_run, whole = one_pass(checkpoints, known_ids)
        assert_equal_rows(run.target_kv(request), whole_run.target_kv(whole))
        assert_equal_rows(run.draft_kv(request), whole_run.draft_kv(whole))
        assert len(run.draft_kv(request)[0]) == len(known_ids) - 1
    assert num_runs_kept > 0  # else no accepted draft was looked at


def test_state_for_the_next_drafts_equals_that_after_one_pass(checkpoints: Checkpoints) -> None:
    run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    request = run.add(Ask(prompt_of(10), greedy(30)))
    run.step()
    for _ in range(8):
        run.step()
        *known_ids, last_id = run.known_ids(request)
        whole_run, whole = one_pass(checkpoints, tuple(known_ids))
        assert whole_run.known_ids(whole)[-1] == last_id
        draft, whole_draft = run.mtp_draft, whole_run.mtp_draft
        assert torch.equal(draft.g_SH[request.slot], whole_draft.g_SH[whole.slot])
        assert torch.equal(draft.anchor_SX[request.slot], whole_draft.anchor_SX[whole.slot])


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("sharing", list(MtpIndexSharing))
def test_every_refreshed_row_has_both_its_latent_and_its_index_key(
    sharing: MtpIndexSharing, num_draft_tokens: int, checkpoints: Checkpoints
) -> None:
    run = CoreRun(
        checkpoints.load(), num_draft_tokens=num_draft_tokens, mtp_index_sharing=sharing, prefill_chunk_tokens=4
    )
    run.poison()
    requests = [run.add(Ask(prompt_of(length), greedy(20))) for length in (1, 4, 11)]
    while run.step():
        for request in requests:
            if request.slot is None:
                continue
            num_rows = int(run.core.slots.computed_S[request.slot])
            for rows in (*run.draft_kv(request), *run.target_kv(request)):
                assert rows.isfinite().all(dim=-1).sum() == num_rows


def test_rejected_drafts_leave_no_trace(checkpoints: Checkpoints) -> None:
    ask = Ask(prompt_of(9), drawn(3, 40))
    script = script_of([ask], [checkpoints.plain(ask)])
    run = CoreRun(
        checkpoints.load(),
        num_draft_tokens=5,
        draft_source=flipping_draft(script, right=0.75, seed=1),
        page_size=1,
    )
    request = run.add(ask)
    num_emitted = set()
    while run.step() and request.slot is not None:
        num_emitted.add(len(run.updates[0][-1].token_ids))
        whole_run, whole = one_pass(checkpoints, run.known_ids(request))
        assert_equal_rows(run.target_kv(request), whole_run.target_kv(whole))
    assert {1, 2, 3, 6} <= num_emitted
    assert run.delivered() == [checkpoints.plain(ask)]


@pytest.mark.parametrize("kv_format", list(KvFormat))
def test_output_does_not_depend_on_what_unused_memory_holds(kv_format: KvFormat, checkpoints: Checkpoints) -> None:
    kv = kv_settings(kv_format)
    asks = [Ask(prompt_of(length), greedy(12)) for length in (1, 9, 22)]
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, prefill_chunk_tokens=7, **kv)
    run.poison()
    for ask in asks:
        run.add(ask)
    assert run.finish() == [checkpoints.plain(ask, **kv) for ask in asks]


def test_order_of_requests_in_the_batch_may_change_between_rounds(checkpoints: Checkpoints) -> None:
    asks = [Ask(prompt_of(3 + index), drawn(index, 20 + index)) for index in range(6)]
    run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    for ask in asks:
        run.add(ask)
    generator = np.random.default_rng(0)
    while run.step():
        slots = run.core.slots
        active = np.flatnonzero(slots.active_S)
        slots.turn_S[active] = generator.permutation(slots.turn_S[active])
        slots.membership += 1
    assert run.delivered() == [checkpoints.plain(ask) for ask in asks]


@pytest.mark.parametrize(
    ("sharing", "choices_a_round"),
    [(MtpIndexSharing.OFF, 3), (MtpIndexSharing.ANCHOR, 1), (MtpIndexSharing.ANCHOR_AND_DRAFTS, 1)],
)
def test_shared_choices_are_made_once_a_round(
    sharing: MtpIndexSharing, choices_a_round: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_choices = 0
    select = Indexer.select

    def counted(self: Indexer, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_choices
        num_choices += kwargs["pool"].geometry.role is PoolRole.DRAFT
        return select(self, *args, **kwargs)

    monkeypatch.setattr(Indexer, "select", counted)
    run = CoreRun(checkpoints.load(), num_draft_tokens=3, mtp_index_sharing=sharing)
    request = run.add(Ask(prompt_of(12), greedy(40)))
    run.step_until_decoding(request)
    num_choices = 0
    num_rounds = 6
    for _ in range(num_rounds):
        run.step()
    assert num_choices == num_rounds * choices_a_round


def test_drafts_after_a_kept_run_are_those_of_an_engine_that_never_drafted(checkpoints: Checkpoints) -> None:
    """Acceptance at every place is the same whether the tokens before came from drafts or one by one."""
    ask = Ask(prompt_of(10), greedy(40))
    output = checkpoints.plain(ask)
    run = CoreRun(checkpoints.load(), num_draft_tokens=3)
    request = run.add(ask)
    run.step()
    length = len(run.known_ids(request))
    while run.step() and request.slot is not None:
        num_kept = len(run.updates[0][-1].token_ids) - 1
        fresh = CoreRun(checkpoints.load(), num_draft_tokens=3)
        begin = length - len(ask.prompt)
        fresh_request = fresh.add(Ask(ask.prompt + output[: begin - 1], greedy(8)))
        fresh.step()
        assert fresh.known_ids(fresh_request) == ask.prompt + output[:begin]
        fresh.step()
        assert len(fresh.updates[0][-1].token_ids) - 1 == num_kept
        length = len(run.known_ids(request))
    acceptance_length = request.speculation.acceptance_length
    assert acceptance_length is not None
    assert 1 < acceptance_length < math.inf
