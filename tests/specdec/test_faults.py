"""Whatever goes wrong ends the requests concerned with a reason; the engine serves on, and nothing is lost."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from specdec.dcp.layout import KvFormat
from specdec.drafting.draft import DraftBatch, Drafts, ObservedRows
from specdec.drafting.scripted_draft import ScriptedDraft
from specdec.engine import Engine
from specdec.engine_config import MAX_DRAFT_TOKENS, EngineConfig
from specdec.errors import ConfigError, OutOfPagesError, RequestError, RoundError
from specdec.models.glm.checkpoint import LoadedCheckpoint
from specdec.models.glm.mtp import MtpLayer
from specdec.models.glm.target import GlmTarget
from specdec.result import BatchError
from specdec.sampling.accept import AcceptanceRule
from specdec.sampling.sampling_params import SamplingParams
from specdec.text.tokenizer import Tokenizer, text_of_bytes
from tests.support.engines import (
    FIRST_SPECIAL_ID,
    VOCAB_SIZE,
    Ask,
    Checkpoints,
    drawn,
    greedy,
    kv_settings,
    prompt_of,
    serve,
)

PROBE = Ask(prompt_of(9), greedy(10))


@contextmanager
def engine_survives(engine: Engine, checkpoints: Checkpoints) -> Iterator[None]:
    """After what happens inside, the engine has all its pages and slots, and serves as before."""
    pages = engine.kv_pages()
    yield
    assert not engine.step()
    assert engine.kv_pages() == pages
    for _ in range(2):
        assert serve(engine, [PROBE])[0].token_ids == checkpoints.plain(PROBE)
    assert engine.kv_pages() == pages


class FaultyDraft:
    """Proposes wrong tokens, and raises when told to."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error
        self.fails_to_observe = False
        self.fails_to_propose = False

    def observe(self, rows: ObservedRows) -> None:
        if self.fails_to_observe:
            raise self._error("cannot observe")

    def propose(self, batch: DraftBatch) -> Drafts:
        if self.fails_to_propose:
            raise self._error("cannot propose")
        token_id_BK = batch.length_B[:, None].repeat(int(batch.num_drafts_B.max()), axis=1) % VOCAB_SIZE
        return Drafts(token_id_BK=token_id_BK, num_drafts_B=batch.num_drafts_B)


@pytest.mark.parametrize("when", ["fails_to_observe", "fails_to_propose"])
def test_error_of_the_draft_source_ends_the_requests_of_its_round(when: str, checkpoints: Checkpoints) -> None:
    draft = FaultyDraft(RuntimeError)
    engine = checkpoints.engine(num_draft_tokens=3, draft_source=draft)
    with engine_survives(engine, checkpoints):
        setattr(draft, when, True)
        with pytest.raises(RoundError, match=r"^request \d+ failed in a round: RuntimeError: cannot"):
            serve(engine, [Ask(prompt_of(12), greedy(20))])
        with pytest.raises(BatchError) as caught:
            serve(engine, [Ask(prompt_of(length), greedy(20)) for length in (1, 5, 30)])
        assert set(caught.value.failures) == {0, 1, 2}
        setattr(draft, when, False)


@pytest.mark.parametrize("when", ["fails_to_observe", "fails_to_propose"])
def test_interrupt_inside_of_a_round_reaches_the_caller_and_leaves_the_engine_whole(
    when: str, checkpoints: Checkpoints
) -> None:
    draft = FaultyDraft(KeyboardInterrupt)
    engine = checkpoints.engine(num_draft_tokens=3, draft_source=draft)
    with engine_survives(engine, checkpoints):
        other = engine.stream(prompt_of(4), greedy(20))
        setattr(draft, when, True)
        with pytest.raises(KeyboardInterrupt):
            serve(engine, [Ask(prompt_of(12), greedy(20))])
        setattr(draft, when, False)
        with pytest.raises(RoundError, match="failed in a round: KeyboardInterrupt"):
            other.result()


def test_interrupted_refresh_leaves_no_page_with_an_unrefreshed_draft_row(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance after an interrupt is that of an engine that was never interrupted."""
    ask = Ask(prompt_of(10), greedy(14))
    (fresh,) = serve(checkpoints.engine(num_draft_tokens=3), [ask])
    forward, calls_left = MtpLayer.forward, 0

    def interrupted(self: MtpLayer, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    for number_of_call in range(1, 8):  # of the prompt, and of the drafts and the refresh of two rounds
        engine = checkpoints.engine(num_draft_tokens=3)
        calls_left = number_of_call
        monkeypatch.setattr(MtpLayer, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serve(engine, [ask])
        monkeypatch.setattr(MtpLayer, "forward", forward)
        (after,) = serve(engine, [ask])
        assert (after.token_ids, after.speculation) == (fresh.token_ids, fresh.speculation)


@pytest.mark.parametrize("number_of_pass", range(1, 9))
def test_error_of_the_target_at_any_pass_ends_the_requests_of_its_round(
    number_of_pass: int, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, passes_left = GlmTarget.forward, number_of_pass

    def failing(self: GlmTarget, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal passes_left
        passes_left -= 1
        if passes_left == 0:
            raise RuntimeError("device lost")
        return forward(self, *args, **kwargs)

    engine = checkpoints.engine(num_draft_tokens=3, prefill_chunk_tokens=4, max_num_requests=2)
    with engine_survives(engine, checkpoints):
        asks = [Ask(prompt_of(length, seed=3), greedy(8)) for length in (3, 9, 5)]
        monkeypatch.setattr(GlmTarget, "forward", failing)
        with pytest.raises(BatchError, match="device lost") as caught:
            serve(engine, asks)
        monkeypatch.setattr(GlmTarget, "forward", forward)
        for place, (ask, result) in enumerate(zip(asks, caught.value.results, strict=True)):
            assert (result is None) == (place in caught.value.failures)
            if result is not None:
                assert result.token_ids == checkpoints.plain(ask)


def checkpoint_with_bad_tokens(checkpoints: Checkpoints, *token_ids: int) -> LoadedCheckpoint:
    """As damaged weights would be: whoever reads one of these tokens computes NaN."""
    checkpoint = checkpoints.load()
    embedding = checkpoint.parameters["embed_tokens"].clone()
    embedding[list(token_ids)] = float("nan")
    return dataclasses.replace(checkpoint, parameters={**checkpoint.parameters, "embed_tokens": embedding})


@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
@pytest.mark.parametrize("kv_format", list(KvFormat))
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_logits_that_are_not_finite_end_their_own_request_only(
    num_draft_tokens: int, kv_format: KvFormat, acceptance: str, checkpoints: Checkpoints
) -> None:
    bad_id = FIRST_SPECIAL_ID - 1
    kv = kv_settings(kv_format)
    bans = {"banned_token_ids": [bad_id]}
    good = [Ask(prompt_of(length), greedy(12, **bans)) for length in (1, 9, 17)]
    bad = [Ask((*prompt_of(6), bad_id, *prompt_of(6, seed=1)), params) for params in (greedy(8), drawn(1, 8))]
    engine = Engine(
        checkpoint_with_bad_tokens(checkpoints, bad_id),
        EngineConfig(
            num_draft_tokens=num_draft_tokens,
            acceptance=AcceptanceRule(acceptance),
            page_size=4,
            num_pages=16,  # so few that the pages of the bad ones are used again
            max_model_len=64,
            prefill_chunk_tokens=5,
            **kv,
        ),
    )
    expected = [checkpoints.plain(ask, **kv) for ask in good]
    for _ in range(2):
        with pytest.raises(BatchError, match="not finite") as caught:
            serve(engine, [good[0], bad[0], good[1], bad[1], good[2]])
        assert set(caught.value.failures) == {1, 3}
        assert "after 0 output tokens: the model's logits are not finite" in str(caught.value.failures[1])
        assert isinstance(caught.value.failures[1], RoundError)
        kept = [result.token_ids for result in caught.value.results if result is not None]
        assert kept == expected
        assert engine.kv_pages() == (16, 16)
        assert not engine.step()


@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
def test_drafts_lose_no_token_before_logits_that_are_not_finite(
    num_draft_tokens: int, acceptance: str, checkpoints: Checkpoints
) -> None:
    ask = Ask(prompt_of(9), greedy(30))
    plain = checkpoints.plain(ask)
    last = next(i for i in range(4, 30) if plain[i] not in {*ask.prompt, *plain[:i]})
    engine = Engine(
        checkpoint_with_bad_tokens(checkpoints, plain[last]),
        EngineConfig(
            num_draft_tokens=num_draft_tokens, acceptance=AcceptanceRule(acceptance), page_size=4, max_model_len=64
        ),
        draft_source=ScriptedDraft(lambda _request: plain, vocab_size=VOCAB_SIZE),
    )
    delivered: list[int] = []
    with pytest.raises(RoundError, match=f"after {last + 1} output tokens: the model's logits are not finite"):
        delivered.extend(token_id for delta in engine.stream(ask.prompt, ask.params) for token_id in delta.token_ids)
    assert tuple(delivered) == plain[: last + 1]


def test_each_choice_that_fails_says_why_it_did(checkpoints: Checkpoints) -> None:
    params = drawn(3, 30, n=2)
    plain = checkpoints.engine(num_draft_tokens=0).generate(PROBE.prompt, params)[0].choices
    unread = [[token_id for token_id in plain[1 - c].token_ids if token_id not in plain[c].token_ids] for c in (1, 0)]
    config = EngineConfig(num_draft_tokens=0, page_size=4, max_model_len=64)
    engine = Engine(checkpoint_with_bad_tokens(checkpoints, unread[0][1], unread[1][4]), config)
    errors: dict[int, BaseException | None] = {}
    engine.prepare(PROBE.prompt, params, on_delta=lambda delta: errors.update({delta.index: delta.error})).start()
    while engine.step():
        pass
    ends = [plain[c].token_ids.index(unread[c][place]) + 1 for c, place in ((0, 1), (1, 4))]
    assert ends[0] != ends[1]
    for choice, end in enumerate(ends):
        assert f"after {end} output tokens: the model's logits are not finite" in str(errors[choice])


def test_kv_that_may_not_be_finite_is_not_shared(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computed nonsense once must not spoil the prefix for good."""
    forward, faulty_passes = GlmTarget.forward, {2}
    num_passes = 0

    def once_nan(self: GlmTarget, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        if num_passes not in faulty_passes:
            return forward(self, *args, **kwargs)
        norm, self.layers[0].input_layernorm = self.layers[0].input_layernorm, torch.full((64,), float("nan"))
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.layers[0].input_layernorm = norm

    ask = Ask(prompt_of(19), greedy(8))
    engine = checkpoints.engine(num_draft_tokens=3, prefill_chunk_tokens=5)
    monkeypatch.setattr(GlmTarget, "forward", once_nan)
    with pytest.raises(RoundError, match="not finite"):
        serve(engine, [ask])
    assert serve(engine, [ask])[0].token_ids == checkpoints.plain(ask)


def test_bans_that_leave_no_token_are_refused_or_end_the_request(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3)
    with engine_survives(engine, checkpoints):
        with pytest.raises(RequestError, match="must leave at least one"):
            serve(engine, [Ask(prompt_of(4), greedy(4, banned_token_ids=list(range(VOCAB_SIZE))))])
        # Each rule leaves a token, together they leave none while the output is shorter than min_tokens.
        asked = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}
        for params in (greedy(4, **asked), drawn(1, 4, **asked)):
            with pytest.raises(RequestError, match="after 0 output tokens: its bans leave no token"):
                serve(engine, [Ask(prompt_of(4), params)])


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "no tokens": ([[]], "the prompt is empty"),
    "no text": ("", "the prompt is empty"),
    "id of the vocabulary size": ([[1, VOCAB_SIZE]], f"prompt token 1 must be an id in 0..{VOCAB_SIZE - 1}, got 512"),
    "negative id": ([[-1]], "prompt token 0 must be an id in 0.*got -1"),
    "huge id": ([[1 << 70]], "prompt token 0 must be an id"),
    "too long": ([list(prompt_of(128))], "has 128 tokens, at most 127 fit into max_model_len 128"),
    "lone surrogate": ("abc\ud800", "lone surrogate '.ud800' at character 3"),
    "fraction": ([[1.5]], "a text, a list of token ids, or a list of messages"),
    "truth value": ([[True]], "a text, a list of token ids, or a list of messages"),
    "mixture": ([[1, "a"]], "a text, a list of token ids, or a list of messages"),
}


ODD_TYPES: dict[str, tuple[Any, str]] = {
    "bytes": (b"ab", "got bytes"),
    "bytearray": (bytearray(b"ab"), "got bytearray"),
    "memoryview": (memoryview(b"ab"), "got memoryview"),
    "nothing": (None, "got NoneType"),
    "one id": (5, "got int"),
    "generator": ((i for i in (1, 2)), "got generator"),
    "array without a dimension": (np.array(5), r"got ndarray of shape \[\]"),
    "array with two": (np.array([[1, 2]]), r"got ndarray of shape \[1, 2\]"),
    "tensor": (torch.tensor([1, 2]), "got Tensor"),
    "object": ({"a": 1}, "got dict"),
    "fractions": ([1.9, 2.9], "item 0 is 1.9"),
    "array of fractions": (np.array([1.5]), r"item 0 is .*1\.5"),
    "truth values": ([True, True], "item 0 is True"),
}


@pytest.mark.parametrize("name", ODD_TYPES)
def test_what_has_no_form_of_a_prompt_is_refused_by_its_type(name: str, checkpoints: Checkpoints) -> None:
    given, message = ODD_TYPES[name]
    engine = checkpoints.engine(num_draft_tokens=0)
    for take in (engine.encode, engine.generate, engine.stream):
        with pytest.raises(RequestError, match=f"^a prompt must be a text, a list of token ids, .*{message}"):
            take(given)
    for read in (engine.score, engine.trace):
        with pytest.raises(RequestError, match=f"^the sequence must be a list of token ids.*{message}"):
            read(given)
    with pytest.raises(RequestError, match="the sequence must be a list of token ids, got str"):
        engine.score("abc")  # type: ignore[arg-type]


def test_arrays_of_ids_are_prompts(checkpoints: Checkpoints) -> None:
    engine, prompt = checkpoints.engine(num_draft_tokens=0), prompt_of(4)
    expected = [checkpoints.plain(Ask(prompt, greedy(3)))]
    array: Any = np.array(prompt)
    assert [result.token_ids for result in engine.generate(array, greedy(3))] == expected
    assert [result.token_ids for result in engine.generate([array, array], greedy(3))] == expected * 2
    assert engine.score(array).logprobs == engine.score(prompt).logprobs


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, 5, [{}]])
def test_parameters_of_another_type_are_refused(params: Any, checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=0)
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        engine.generate("a", params)
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        engine.stream("a", params)


def test_text_far_beyond_the_limit_is_refused_before_it_is_split_into_tokens(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = checkpoints.engine(num_draft_tokens=0)
    assert engine.tokenizer is not None
    longest = max(len(engine.tokenizer.token_bytes(token_id)) for token_id in range(VOCAB_SIZE))
    text = "a" * (127 * longest)
    with pytest.raises(RequestError, match=r"the prompt has .* tokens, at most 127 fit"):
        engine.stream(text, greedy(1))

    def encode(*_arguments: Any) -> list[int]:
        raise AssertionError("the text was split")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(RequestError, match=f"{len(text) + 1} characters, so at least 128 tokens; at most 127 fit"):
        engine.stream(text + "a", greedy(1))


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_prompt_that_cannot_be_served_is_refused_before_anything_runs(name: str, checkpoints: Checkpoints) -> None:
    prompt, message = BAD_PROMPTS[name]
    engine = checkpoints.engine(num_draft_tokens=3)
    with engine_survives(engine, checkpoints):
        with pytest.raises(RequestError, match=message):
            engine.generate(prompt, greedy(4))
        whole_batch = [prompt_of(3), prompt if isinstance(prompt, str) else prompt[0]]
        with pytest.raises(RequestError, match=message):
            engine.generate(whole_batch, greedy(4))
        with pytest.raises(RequestError, match=message):
            engine.stream(prompt if isinstance(prompt, str) else prompt[0], greedy(4))


def test_bytes_that_are_no_text_are_refused_with_their_place() -> None:
    with pytest.raises(RequestError, match="prompt must be UTF-8, got byte 0xff at offset 2"):
        text_of_bytes(b"ab\xffcd", source="prompt")


BAD_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -0.1}, "temperature must be in 0..100, got -0.1"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    "stop id": ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids must be below the vocabulary size 512, got 512"),
    "bias id": ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias must be below the vocabulary size"),
    "logprobs": ({"logprobs": -1}, "logprobs must be in 0"),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_impossible_parameters_are_refused_with_name_and_value(name: str, checkpoints: Checkpoints) -> None:
    asked, message = BAD_PARAMETERS[name]
    engine = checkpoints.engine(num_draft_tokens=3)
    with engine_survives(engine, checkpoints), pytest.raises(RequestError, match=message):
        engine.generate([prompt_of(4)], SamplingParams(**asked))


def test_stop_strings_without_a_tokenizer_are_refused(checkpoints: Checkpoints) -> None:
    engine = Engine(checkpoints.load(), EngineConfig(page_size=4, max_model_len=64))
    with engine_survives(engine, checkpoints):
        with pytest.raises(RequestError, match="no tokenizer"):
            serve(engine, [Ask(prompt_of(4), greedy(4, stop="x"))])
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate("text")
        with pytest.raises(RequestError, match="no chat template"):
            engine.generate([{"role": "user", "content": "hello"}])


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no drafts": ({"num_draft_tokens": -1}, "num_draft_tokens must be an integer >= 0, got -1"),
    "many drafts": ({"num_draft_tokens": 33}, f"num_draft_tokens must lie in 0..{MAX_DRAFT_TOKENS}, got 33"),
    "fraction of a draft": ({"num_draft_tokens": 1.5}, "num_draft_tokens must be an integer >= 0, got 1.5"),
    "text for a number": ({"page_size": "4"}, "page_size must be an integer >= 1, got '4'"),
    "truth value": ({"max_num_requests": True}, "max_num_requests must be an integer >= 1, got True"),
    "no chunk": ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens must be an integer >= 1, got 0"),
    "page of three": ({"page_size": 3}, "page_size.*power of two.*3"),
    "no pages": ({"num_pages": 0}, "num_pages must be an integer >= 1, got 0"),
    "too few pages": (
        {"num_pages": 15, "max_model_len": 64, "page_size": 4},
        "max_model_len 64 needs 16 pages of 4 tokens.*num_pages is 15: raise num_pages or lower max_model_len",
    ),
    "context of one": ({"max_model_len": 1}, "max_model_len must be >= 2"),
    "context beyond the checkpoint's": (
        {"max_model_len": 257},
        "max_model_len must be at most the checkpoint's max_position_embeddings 256, got 257",
    ),
    "fp8 without a scale": ({"kv_format": "fp8"}, "kv_scale belongs to kv format fp8 and must be given there"),
    "scale without fp8": ({"kv_scale": 1.0}, "kv_scale belongs to kv format fp8"),
    "scale as text": ({"kv_format": "fp8", "kv_scale": "1"}, "kv_scale must be a number, got '1'"),
    "truth value for a scale": ({"kv_format": "fp8", "kv_scale": True}, "kv_scale must be a number, got True"),
    "scale that is no number": ({"kv_format": "fp8", "kv_scale": float("nan")}, "scale"),
    "text for a truth value": ({"prefix_cache": "no"}, "prefix_cache must be true or false, got 'no'"),
    "number for a truth value": ({"prefix_cache": 0}, "prefix_cache must be true or false, got 0"),
    "eps as text": ({"latent_norm_eps": "1e-6"}, "latent_norm_eps must be a number, got '1e-6'"),
    "no page size": ({"page_size": None}, "page_size must be an integer >= 1, got None"),
    "number for a rule": ({"acceptance": 3}, "acceptance must be one of sampled, rejection, got 3"),
    "scale of zero": ({"kv_format": "fp8", "kv_scale": 0.0}, "kv_scale must be in 1e-30..1e.30, got 0"),
    "scale beyond all": ({"kv_format": "fp8", "kv_scale": 10**400}, "kv_scale must be a number that a float can hold"),
    "unknown format": (
        {"kv_format": "fp4"},
        "kv_format must be one of float32, bfloat16, fp8, fp8_packed, got 'fp4'",
    ),
    "unknown rule": ({"acceptance": "typical"}, "acceptance must be one of sampled, rejection, got 'typical'"),
    "no rule": ({"acceptance": None}, "acceptance must be one of sampled, rejection, got None"),
    "unknown sharing": ({"mtp_index_sharing": "all"}, "mtp_index_sharing must be one of off, anchor"),
    "impatience with prefills": ({"peer_timeout_s": 1.0}, "peer_timeout_s must be at least 1.5 and at most"),
    "no time for a prompt": ({"prefill_timeout_s": 0.0}, "prefill_timeout_s must be positive and at most"),
    "eps of zero": ({"latent_norm_eps": 0.0}, "latent_norm_eps must be positive and below 1, got 0.0"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_impossible_settings_are_refused_with_value_and_rule(name: str, checkpoints: Checkpoints) -> None:
    settings, message = BAD_SETTINGS[name]
    with pytest.raises(ConfigError, match=message):
        Engine(checkpoints.load(), EngineConfig(**settings))


def test_unknown_settings_and_models_are_refused_by_name(checkpoints: Checkpoints) -> None:
    loads: list[tuple[Callable[[], Engine], str]] = [
        (lambda: Engine.from_pretrained(checkpoints.path(), num_drafts=3), "unknown engine setting 'num_drafts'"),
        (lambda: Engine.from_pretrained(checkpoints.path(), dtype="float16"), "dtype must be one of.*'float16'"),
        (lambda: Engine.from_pretrained("no-such-model"), "no-such-model"),
        (lambda: Engine.from_pretrained(checkpoints.path(), device="cuda:99"), "device cuda:99 cannot be used here: "),
        (
            lambda: Engine.from_pretrained(checkpoints.path(), device="meta"),
            "device meta cannot be used here: it holds",
        ),
        (lambda: Engine.from_pretrained(None), "model must be a checkpoint directory or a name.*got None"),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained(5), "model must be a checkpoint directory or a name.*got 5"),  # type: ignore[arg-type]
        (lambda: checkpoints.engine(draft_source=5), "draft_source must have .*, got int without observe and propose"),  # type: ignore[arg-type]
        (
            lambda: Engine.from_pretrained(checkpoints.path(), draft_source=5),  # type: ignore[arg-type]
            "draft_source must have .*, got int without observe and propose",
        ),
        (lambda: Engine.from_pretrained(checkpoints.path(), device="gpu"), "device gpu cannot be used here: .*gpu"),
    ]
    for load, message in loads:
        with pytest.raises(ConfigError, match=message):
            load()


@pytest.mark.parametrize("rate", ["x", float("nan"), 5, True])
def test_share_of_audited_rounds_must_be_a_share(rate: Any, checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=0)
    with pytest.raises(ConfigError, match="audit_rate must"):
        engine.start_audit(rate=rate)
    assert engine.core.audit is None


def test_numbers_of_numpy_may_be_settings() -> None:
    config = EngineConfig(
        num_draft_tokens=np.int64(2),  # type: ignore[arg-type]
        num_pages=np.uint32(40),  # type: ignore[arg-type]
        latent_norm_eps=np.float32(0.5),  # type: ignore[arg-type]
    )
    assert config == EngineConfig(num_draft_tokens=2, num_pages=40, latent_norm_eps=0.5)
    assert type(config.num_pages) is int


@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_settings_may_be_given_as_text(acceptance: str, checkpoints: Checkpoints) -> None:
    ask = Ask(prompt_of(7), drawn(9, 20))
    engine = checkpoints.engine(num_draft_tokens=3, acceptance=acceptance, kv_format="bfloat16")
    same_as_plain = serve(engine, [ask])[0].token_ids == checkpoints.plain(ask, kv_format=KvFormat.BFLOAT16)
    assert same_as_plain == (acceptance == "sampled")


def test_speculation_without_an_mtp_layer_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"no MTP layer.*num_draft_tokens 0"):
        checkpoints.engine("without_mtp", num_draft_tokens=1)
    engine = checkpoints.engine("without_mtp", num_draft_tokens=0)
    assert serve(engine, [PROBE])[0].token_ids == checkpoints.plain(PROBE)
    # Its own draft source needs no MTP layer.
    engine = checkpoints.engine("without_mtp", num_draft_tokens=2, draft_source=FaultyDraft(RuntimeError))
    assert serve(engine, [PROBE])[0].token_ids == checkpoints.plain(PROBE)


def test_score_without_pages_is_refused_and_holds_none(checkpoints: Checkpoints) -> None:
    engine = checkpoints.engine(num_draft_tokens=3, num_pages=10, max_model_len=40)
    with engine_survives(engine, checkpoints):
        with engine.stream(prompt_of(20), greedy(15)) as running:
            next(running)
            with pytest.raises(OutOfPagesError, match="10 KV pages wanted"):
                engine.score(prompt_of(40))
            assert running.result().token_ids == checkpoints.plain(Ask(prompt_of(20), greedy(15)))
        assert len(engine.score(prompt_of(40)).logprobs) == 39
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.score([])
