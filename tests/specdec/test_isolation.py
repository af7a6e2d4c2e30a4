"""Odd values of one request, or of a checkpoint, are refused early and never reach the round of the others."""

import numpy as np
import pytest
import torch

from specdec import ConfigError, Engine, EngineConfig, RequestError, SamplingParams
from specdec.dcp.allocator import PageAllocator
from specdec.dcp.prefix_tree import PrefixTree
from specdec.sampling.token_logprobs import token_logprobs
from specdec.scheduler import Scheduler
from specdec.slot_table import SlotTable
from tests.support.engines import Checkpoints


@pytest.mark.parametrize("top_k", [2**31, 2**63, 2**70])
def test_a_top_k_beyond_any_vocabulary_is_refused(top_k: int) -> None:
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=top_k)


def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused(checkpoints: Checkpoints) -> None:
    loaded = checkpoints.load()
    with pytest.raises(ConfigError, match="end-of-sequence id 512 is outside the vocabulary of 512"):
        Engine(loaded, EngineConfig(num_draft_tokens=0), eos_ids=[512])


@pytest.mark.parametrize("prompts", [{"role": "user", "content": "x"}, b"bytes", None, 7])
def test_what_is_no_prompt_is_refused(prompts: object, checkpoints: Checkpoints) -> None:
    engine = Engine(checkpoints.load(), EngineConfig(num_draft_tokens=0))
    with pytest.raises(RequestError, match="a prompt must be"):
        engine.generate(prompts)  # type: ignore[arg-type]


def test_a_row_of_nan_names_no_alternative() -> None:
    logits_RV = torch.randn(2, 9)
    logits_RV[0] = torch.nan
    of_nan, of_numbers = token_logprobs(logits_RV, logits_RV, [3, 3], num_top=2)
    assert of_nan.top == ()
    assert len(of_numbers.top) == 2


def test_pages_that_could_not_be_enough_stay_cached() -> None:
    allocator = PageAllocator(10, 1)
    tree = PrefixTree(allocator, 4)
    pages = allocator.allocate(4)
    tree.insert(np.arange(17), pages, 16)
    allocator.release(pages)
    slots = SlotTable(num_slots=2, max_model_len=40, max_draft_tokens=0, page_size=4)
    scheduler = Scheduler(slots, allocator, tree, num_draft_tokens=0, prefill_chunk_tokens=8)
    assert not scheduler.make_room(11)
    assert tree.num_pages == 4
    assert scheduler.make_room(8)
    assert tree.num_pages == 2
