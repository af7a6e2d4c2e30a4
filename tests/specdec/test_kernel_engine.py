"""An engine that runs on the kernels says what plain decoding says, on a CPU with definitions in their place."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec.dcp.layout import KvFormat
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.kernel_set import KernelSet
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.kernel_target import KernelTarget
from specdec.ranks import rank_setup
from specdec.ranks.kernel_choice import KernelChoice
from specdec.result import GenerationResult
from specdec.sampling.sampling_params import SamplingParams
from tests.support.engines import write_engine_checkpoint
from tests.support.kernel_definitions import use_definitions
from tests.support.tiny_checkpoint import tiny_spec

SPEC = tiny_spec(
    "real_dims", weights="fp8", hidden_size=512, q_lora_rank=512, intermediate_size=512, moe_intermediate_size=256,
    num_layers=2, num_heads=4, num_experts=4, index_topk=64, vocab_size=128, indexer_types=("full", "shared"),
)  # fmt: skip
GENERATOR = torch.Generator().manual_seed(5)
# A chunk of several passes, one token below a page, a few tokens.
PROMPTS = [torch.randint(0, SPEC.first_special_id, (n,), generator=GENERATOR).tolist() for n in (200, 63, 5)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine_checkpoint(tmp_path_factory.mktemp("kernels"), SPEC)


@pytest.fixture
def on_kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_definitions(monkeypatch, GlmConfig.from_file(path / "config.json"))
    choice = KernelChoice(kernels=KernelSet.HOPPER)
    monkeypatch.setattr(rank_setup, "choose_kernels", lambda *_args, **_settings: choice)
    with torch.no_grad():
        yield


def engine(path: Path, num_draft_tokens: int) -> Engine:
    return Engine.from_pretrained(
        path, dtype="bfloat16", num_draft_tokens=num_draft_tokens, max_model_len=256, max_num_requests=3,
        prefill_chunk_tokens=256,
    )  # fmt: skip


def generated(path: Path, num_draft_tokens: int, params: list[SamplingParams]) -> list[GenerationResult]:
    with engine(path, num_draft_tokens) as running:
        return running.generate(PROMPTS, params)


@pytest.mark.usefixtures("on_kernels")
def test_drafts_change_nothing(path: Path) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, seed=1, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    ]
    plain, drafted = generated(path, 0, params), generated(path, 3, params)
    for mine, theirs in zip(plain, drafted, strict=True):
        assert mine.choices[0].token_ids == theirs.choices[0].token_ids
    assert sum(each.choices[0].speculation.num_accepted_tokens for each in drafted) > 0


@pytest.mark.usefixtures("on_kernels")
def test_the_cache_is_packed_and_a_second_prompt_reuses_it(path: Path) -> None:
    with engine(path, 3) as running:
        worker = running.core.ranks.worker
        assert isinstance(worker.target, KernelTarget)
        assert worker.pool.layout.kv_format is KvFormat.FP8_PACKED
        assert "kernels: hopper" in running.report_lines()
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        first, second = (running.generate([PROMPTS[0]], params)[0] for _ in range(2))
        assert first.choices[0].token_ids == second.choices[0].token_ids
        assert second.usage.num_cached_tokens == 192
        with pytest.raises(ConfigError, match="only torch traces"):
            running.trace(PROMPTS[2])


def test_what_the_kernels_say_is_what_torch_says(path: Path, on_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)] * 3
    ours = generated(path, 0, params)
    monkeypatch.undo()
    plain = generated(path, 0, params)
    for mine, theirs in zip(ours, plain, strict=True):
        tops = [dict(result.choices[0].logprobs[0].top) for result in (mine, theirs)]
        both = [(tops[0][token_id], value) for token_id, value in tops[1].items() if token_id in tops[0]]
        assert len(both) >= 3
        for ours_value, torch_value in both:
            assert abs(ours_value - torch_value) < 0.3  # bfloat16 there, FP8 cache and index here
