"""What a server of two dcp ranks says of its shards and merges: while replies are made, and behind them."""

import threading
import time
from functools import partial

import pytest

from specdec.dcp.page_ids import owner
from specdec.serving.engine_gauges import read_gauges
from tests.support.engines import PARALLEL, Checkpoints, prompt_of
from tests.support.metric_samples import samples
from tests.support.running_server import RunningServer, running_server, wait_until
from tests.support.thread_engine import ThreadEngines

PAGE_SIZE = 16
SHORT, LONG = prompt_of(5), prompt_of(70, seed=1)  # a page of one rank alone, and five that go round
COMPLETION = {"prompt": [SHORT, LONG], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def metrics(server: RunningServer) -> dict[tuple[str, ...], float]:
    with server.client() as client:
        return samples(client.get("/metrics").text)


def test_shards_of_running_requests_and_the_time_of_merges_are_told(
    checkpoints: Checkpoints, thread_engines: ThreadEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_engines.open(tp_size=2, dcp_size=2, page_size=PAGE_SIZE, prefix_cache=False) as ranks:
        engine = ranks.engine(tokenizer=checkpoints.tokenizer())
        slots, run_round, may_go_on = engine.core.slots, engine.step, threading.Event()

        def both_decode() -> bool:
            return bool(slots.decoding_S.sum() == 2)

        def step() -> bool:
            if both_decode() and not may_go_on.is_set():
                time.sleep(0.005)  # the server asks for the next round, and reads its metrics between two
                return True
            return run_round()

        monkeypatch.setattr(engine, "step", step)
        with running_server(engine, read_gauges=partial(read_gauges, engine)) as server, server.client() as client:
            asking = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": COMPLETION})
            asking.start()
            wait_until(both_decode, "both have drawn a token")
            held = metrics(server)
            num_tokens_N = [0, 0]
            for slot in (0, 1):
                for position in range(slots.computed_S[slot]):
                    num_tokens_N[owner(slots.pages(slot)[position // PAGE_SIZE], 2)] += 1
            may_go_on.set()
            asking.join()
            after = metrics(server)
    assert [held["specdec:kv_shard_tokens", rank] for rank in "01"] == num_tokens_N
    assert held["specdec:kv_shard_balance",] == sum(num_tokens_N) / 2 / max(num_tokens_N)
    assert held["specdec:kv_empty_shards",] == 1
    assert sum(num_tokens_N) >= len(SHORT) + len(LONG)
    assert held["specdec:dcp_merges_total",] % PARALLEL.num_layers == 0
    assert [after["specdec:kv_shard_tokens", rank] for rank in "01"] == [0, 0]
    assert (after["specdec:kv_shard_balance",], after["specdec:kv_empty_shards",]) == (1, 0)
    assert after["specdec:dcp_merges_total",] > held["specdec:dcp_merges_total",]
    assert after["specdec:dcp_merge_seconds_total",] > held["specdec:dcp_merge_seconds_total",] > 0


def test_one_rank_has_neither_shards_nor_merges(checkpoints: Checkpoints) -> None:
    with checkpoints.engine(page_size=PAGE_SIZE) as engine:
        engine.generate(SHORT)
        gauges = read_gauges(engine)
        assert gauges.shards is None
        assert gauges.merges is None
        assert engine.core.ranks.worker.groups.merge_clock.read().num_merges == 0
