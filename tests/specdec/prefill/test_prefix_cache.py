"""What a prefill keeps for later prompts: never at the cost of what is being sent, and for nobody but those it is for.

Ranks are threads and transports are real.
"""

import pytest

from tests.support.engines import Ask, Checkpoints, greedy, prompt_of, serve, tokens
from tests.support.faulty_transport import Fault
from tests.support.handoff import Groups
from tests.support.running_server import wait_until
from tests.support.thread_engine import ThreadEngines

MODEL = "parallel"


@pytest.fixture
def groups(checkpoints: Checkpoints, thread_engines: ThreadEngines) -> Groups:
    return Groups(checkpoints, thread_engines, model=MODEL)


def test_pages_that_are_being_sent_are_not_given_to_the_next_prompt(groups: Groups, checkpoints: Checkpoints) -> None:
    """B48: a prompt whose request is over is in the tree and on its way; the next waits, though nothing runs."""
    first, second = Ask(prompt_of(29), greedy(3)), Ask(prompt_of(30, seed=1), greedy(3))
    with groups.prefill(num_pages=8, max_model_len=32) as prefill, groups.decode(prefill) as engine:
        scheduler = prefill.engine.core.scheduler
        assert scheduler.prefix_tree is not None
        prefill.transport.faults.extend([Fault.HOLD] * 100)
        with engine.stream(first.prompt, first.params) as one, engine.stream(second.prompt, second.params) as other:
            wait_until(lambda: engine.step() and len(scheduler.waiting) == 1 and scheduler.slots.num_active == 0, "")
            sent = list(scheduler.prefix_tree.page_ids())
            assert len(sent) == 7
            for _ in range(20):
                engine.step()
            assert scheduler.allocator.num_free == 0
            assert list(scheduler.prefix_tree.page_ids()) == sent
            assert len(scheduler.waiting) == 1
            prefill.transport.faults.clear()
            prefill.transport.release()
            texts = [one.result().token_ids, other.result().token_ids]
        assert texts == [checkpoints.plain(ask, MODEL) for ask in (first, second)]
        wait_until(lambda: prefill.is_at_start, "all pages are free")


def test_what_was_computed_under_a_salt_is_found_under_it_alone(groups: Groups, checkpoints: Checkpoints) -> None:
    """The group keeps nothing here: what is found, the prefill has."""
    ask = Ask(prompt_of(21), greedy(4))
    with groups.prefill() as prefill, groups.decode(prefill, prefix_cache=False) as engine:
        hits = []
        for salt in ("one", "another", None, "one", "another", None):
            (result,) = engine.generate(ask.prompt, ask.params, cache_salt=salt)
            assert result.token_ids == checkpoints.plain(ask, MODEL)
            hits.append(result.usage.num_cached_tokens)
        assert hits == [0, 0, 0, 20, 20, 20]


def test_a_conversation_stays_at_the_prefill_that_has_it(groups: Groups, checkpoints: Checkpoints) -> None:
    num_tokens = {1: 21, 2: 21}
    with groups.prefill() as one, groups.prefill() as other, groups.decode(one, other, prefix_cache=False) as engine:
        for turn, seed in enumerate((1, 2, 1, 1, 1, 2, 2, 1)):
            ask = Ask(prompt_of(80, seed=seed)[: num_tokens[seed]], greedy(4))
            (result,) = serve(engine, [ask])
            assert tokens([result]) == [checkpoints.plain(ask, MODEL)]
            assert result.usage.num_cached_tokens == (0 if turn < 2 else (num_tokens[seed] - 13) // 4 * 4)
            num_tokens[seed] += 12
        assert [each.server.counts.num_done for each in (one, other)] == [5, 3]
