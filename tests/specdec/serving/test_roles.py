"""Servers that compute prompts for others, have theirs computed, or do both, give what one server alone gives.

The engines are tiny, the lines and the transport between them real.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from specdec.engine import Engine
from specdec.engine_config import EngineConfig
from specdec.errors import ConfigError
from specdec.handoff.prefill_link import LinkState
from specdec.prefill.server import PrefillServer
from specdec.ranks.passes import Ranks
from specdec.ranks.rank_setup import build_worker
from specdec.serving.engine_gauges import read_gauges
from specdec.serving.roles import Role, read_role, settings_of_role
from tests.support.engines import Ask, Checkpoints, greedy, prompt_of
from tests.support.metric_samples import samples
from tests.support.running_server import RunningServer, running_server, wait_until

SETTINGS: Mapping[str, Any] = {"page_size": 4, "max_model_len": 128, "transport": "local", "prefill_chunk_tokens": 8}
NEVER_S = 60.0
NUM_TOKENS = 6
PROMPTS = [prompt_of(21), prompt_of(33, seed=1), (*prompt_of(21), 5, 6, 7), prompt_of(40, seed=2)]


class Servers:
    """Opens servers over one tiny checkpoint."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    @contextmanager
    def prefill(self, role: Role = Role.PREFILL) -> Iterator[tuple[RunningServer, PrefillServer]]:
        """One that decode groups may call."""
        num_draft_tokens = 0 if role is Role.PREFILL else 3
        config = EngineConfig(num_draft_tokens=num_draft_tokens, **SETTINGS)
        checkpoint = self._checkpoints.load()
        worker = build_worker(checkpoint, config, with_draft=True)
        with Engine(checkpoint, config, tokenizer=self._checkpoints.tokenizer(), ranks=Ranks(worker)) as engine:
            door = PrefillServer(engine)
            gauges = partial(read_gauges, engine, door)
            answers = role.answers_requests
            with running_server(engine, read_gauges=gauges, prefill=door, answers_requests=answers) as running:
                yield running, door

    @contextmanager
    def decode(self, *prefills: PrefillServer) -> Iterator[RunningServer]:
        addresses = tuple(prefill.address for prefill in prefills)
        timeouts = {"prefill_timeout_s": NEVER_S, "peer_timeout_s": NEVER_S}
        with self._checkpoints.engine(prefill=addresses, **{**SETTINGS, **timeouts}) as engine:
            with running_server(engine, read_gauges=partial(read_gauges, engine)) as running:
                yield running
            assert engine.kv_pages()[0] == engine.kv_pages()[1]

    def right(self, prompt: Sequence[int]) -> str:
        """What a request is answered with where no server stands between."""
        engine = self._checkpoints.engine(num_draft_tokens=0, prefix_cache=False)
        (result,) = engine.generate(prompt, greedy(NUM_TOKENS))
        assert result.token_ids == self._checkpoints.plain(Ask(tuple(prompt), greedy(NUM_TOKENS)))
        return result.text


@pytest.fixture
def servers(checkpoints: Checkpoints) -> Servers:
    return Servers(checkpoints)


def ask(server: RunningServer, prompt: Sequence[int]) -> Any:
    body = {"prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with server.client() as client:
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def ask_all(*pairs: tuple[RunningServer, Sequence[int]]) -> list[str]:
    """Ask at the same time; gives the texts in order."""
    texts = [""] * len(pairs)

    def one(place: int, server: RunningServer, prompt: Sequence[int]) -> None:
        texts[place] = text_of(ask(server, prompt))

    threads = [threading.Thread(target=one, args=(place, *pair)) for place, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def metrics(server: RunningServer) -> dict[tuple[str, ...], float]:
    with server.client() as client:
        return samples(client.get("/metrics").text)


def test_two_decode_servers_have_their_prompts_computed_by_one(servers: Servers) -> None:
    right = [servers.right(prompt) for prompt in PROMPTS]
    with (
        servers.prefill() as (prefill, door),
        servers.decode(door) as first,
        servers.decode(door) as second,
    ):
        assert ask_all(*((server, prompt) for server in (first, second) for prompt in PROMPTS)) == 2 * right
        with first.client() as client:
            assert client.get("/ready").json() == {"status": "ready", "prefills": {door.address: "ready"}}
        for server in (first, second):
            found = metrics(server)
            assert found["specdec:prefill_state", door.address, "ready"] == 1
            assert found["specdec:prefill_transfers_total", "arrived", door.address] == len(PROMPTS)
            assert found["specdec:prefill_prompt_tokens_total", door.address] == sum(map(len, PROMPTS))
        wait_until(lambda: metrics(prefill)["specdec:transfers_total", "done"] == 2 * len(PROMPTS), "all are done")
        found = metrics(prefill)
        assert found["specdec:decode_groups",] == 2
        assert found["specdec:transfers_running",] == 0
        assert found["specdec:transfer_prompt_tokens_total",] == 2 * sum(map(len, PROMPTS))
        assert found["specdec:transfer_bytes_total", "0", "target.latent", "0"] > 0


def test_a_prefill_answers_questions_about_itself_alone(servers: Servers) -> None:
    with servers.prefill() as (prefill, _door), prefill.client() as client:
        answers = {path: client.get(path).status_code for path in ("/health", "/ready", "/version", "/metrics")}
        assert set(answers.values()) == {200}
        refused = client.post("/v1/completions", json={"prompt": "Hello"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        assert client.get("/v1/models").status_code == 404


def test_one_server_answers_and_computes_prompts_for_another(servers: Servers) -> None:
    right = [servers.right(prompt) for prompt in PROMPTS]
    with servers.prefill(Role.BOTH) as (both, door), servers.decode(door) as decode:
        for _ in range(2):  # the second time out of both caches
            pairs = [(server, prompt) for prompt in PROMPTS for server in (both, decode)]
            assert ask_all(*pairs) == [text for text in right for _ in range(2)]
        cached = ask(decode, PROMPTS[0])["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(PROMPTS[0]) // 4 * 4
        assert metrics(both)["specdec:transfers_total", "done"] >= 2 * len(PROMPTS)
        assert metrics(both)["specdec:spec_decode_num_drafts_total",] > 0


def test_a_prefill_that_drains_ends_what_it_has_and_sends_the_rest_elsewhere(servers: Servers) -> None:
    right = [servers.right(prompt) for prompt in PROMPTS]
    with (
        servers.prefill() as (draining, draining_door),
        servers.prefill() as (_other, other_door),
        servers.decode(draining_door, other_door) as decode,
    ):
        draining_door.drain()
        assert ask_all(*((decode, prompt) for prompt in PROMPTS)) == right
        found = metrics(decode)
        assert found["specdec:prefill_transfers_total", "arrived", draining_door.address] == 0
        draining.drain()
        wait_until(lambda: draining.failure is None and not _is_up(draining), "the server has ended")
        assert ask_all(*((decode, prompt) for prompt in PROMPTS)) == right


def _is_up(server: RunningServer) -> bool:
    return not server.loop.is_closed()


def test_without_a_prefill_that_is_ready_a_server_is_not(servers: Servers) -> None:
    with servers.prefill() as (prefill, door), servers.decode(door) as decode, decode.client() as client:
        prefill.drain()
        wait_until(lambda: not _is_up(prefill), "the server has ended")
        states = decode.service.engine
        wait_until(lambda: set(states.prefill_states.values()) == {LinkState.DOWN.value}, "the line is over")
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert f"{door.address} is down" in ready.json()["error"]["message"]
        assert client.get("/health").status_code == 200
        refused = client.post("/v1/completions", json={"prompt": [1, 2, 3]})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


ADDRESS = {"prefill": ["127.0.0.1:7100"]}


@pytest.mark.parametrize(
    ("role", "given", "listens", "reason"),
    [
        (Role.DECODE, {}, False, "got no --prefill"),
        (Role.PREFILL, ADDRESS, False, "role prefill computes prompts itself, got --prefill 127.0.0.1:7100"),
        (Role.BOTH, ADDRESS, True, "role both computes prompts itself"),
        (None, {}, True, "a server without a role takes no calls of decode groups"),
        (Role.DECODE, ADDRESS, True, "role decode takes no calls"),
        (Role.PREFILL, {"num_draft_tokens": 3}, True, "role prefill drafts nothing, got num_draft_tokens 3"),
        (Role.BOTH, {"draft_kv": False}, True, "computes the draft KV that it drafts with"),
        (None, {"draft_kv": False}, False, "computes the draft KV that it drafts with"),
    ],
)
def test_settings_that_do_not_go_with_a_role_are_refused(
    role: Role | None, given: dict[str, Any], listens: bool, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        settings_of_role(role, given, listens=listens)


def test_a_role_chooses_what_it_needs_and_leaves_what_was_given() -> None:
    given = {"page_size": 16}
    assert settings_of_role(None, given, listens=False) == given
    assert settings_of_role(Role.DECODE, {**given, **ADDRESS}, listens=False) == {**given, **ADDRESS}
    assert settings_of_role(Role.BOTH, given, listens=True) == {**given, "transport": "local"}
    asked = {"transport": "nixl", "draft_kv": False, "num_draft_tokens": 0}
    assert settings_of_role(Role.PREFILL, asked, listens=False) == asked
    assert settings_of_role(Role.PREFILL, given, listens=True) == {
        **given,
        "transport": "local",
        "num_draft_tokens": 0,
        "draft_kv": True,
    }
    assert (read_role(None), read_role("both")) == (None, Role.BOTH)
    with pytest.raises(ConfigError, match="role must be one of prefill, decode, both, got 'router'"):
        read_role("router")


def test_a_server_with_prefills_serves_no_groups(checkpoints: Checkpoints, servers: Servers) -> None:
    with servers.prefill() as (_prefill, door), servers.decode(door) as decode:
        engine: Any = decode.service.engine
        with pytest.raises(ConfigError, match="a prefill computes prompts itself"):
            PrefillServer(engine)
