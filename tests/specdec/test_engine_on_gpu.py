"""What the definitions say on a GPU is what they say on a CPU, where transformers is the reference."""

from pathlib import Path

import pytest
import torch

from specdec import Engine, SamplingParams
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.target import GlmTarget
from specdec.result import GenerationResult
from tests.models.glm.test_target_parity import CHUNKINGS, NUM_TOKENS, REFERENCE_LATENT_NORM_EPS, Reference
from tests.specdec.test_glm_tiny import CODE
from tests.support.engines import write_engine_checkpoint
from tests.support.gpu import needs_gpu
from tests.support.passes import OneRequest, run_target
from tests.support.tiny_checkpoint import tiny_spec, write_tiny_checkpoint

pytestmark = needs_gpu


@pytest.mark.parametrize("preset", ["share", "groups", "real_dims"])
def test_float32_equals_transformers(preset: str, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", tiny_spec(preset))
    token_ids = torch.randint(0, 400, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7))
    loaded = load_checkpoint(path, dtype=torch.float32, device="cuda")
    target = GlmTarget(loaded.config, loaded.parameters, latent_norm_eps=REFERENCE_LATENT_NORM_EPS)
    request = OneRequest(loaded.config, num_tokens=NUM_TOKENS, device="cuda")
    hidden_TH, _ = run_target(target, request, token_ids.cuda(), chunks=CHUNKINGS["chunked"])
    torch.testing.assert_close(target.logits(hidden_TH).cpu(), Reference(path, token_ids).logits, atol=1e-4, rtol=0)


def test_the_shipped_checkpoint_drafts_as_well_as_on_a_cpu() -> None:
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    lengths = []
    for device in ("cpu", "cuda"):
        plain, drafted = (
            Engine.from_pretrained("glm-tiny", device=device, num_draft_tokens=k).generate(CODE, params)[0]
            for k in (0, 3)
        )
        assert drafted.token_ids == plain.token_ids, device
        lengths.append(drafted.speculation.acceptance_length)
    assert abs(lengths[0] - lengths[1]) < 0.15


@pytest.mark.parametrize("weights", ["float32", "fp8"])
@pytest.mark.parametrize(
    ("dtype", "kv_format", "tolerance"),
    [("float32", "float32", 1e-3), ("bfloat16", "bfloat16", 0.15), ("bfloat16", "fp8_packed", 0.3)],
)
def test_formats_are_as_near_as_their_rounding(
    weights: str, dtype: str, kv_format: str, tolerance: float, tmp_path: Path
) -> None:
    spec = tiny_spec("share", long=True, weights=weights, num_experts=2)  # no choice that rounding may turn
    path = write_engine_checkpoint(tmp_path / "model", spec)
    prompt = torch.randint(0, 400, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=8, ignore_eos=True)

    def first(device: str, **settings: str) -> dict[int, float]:
        engine = Engine.from_pretrained(path, device=device, num_draft_tokens=2, max_model_len=128, **settings)
        result: GenerationResult = engine.generate(prompt, params)[0]
        assert result.choices[0].logprobs is not None
        return dict(result.choices[0].logprobs[0].top)

    plain, ours = first("cpu"), first("cuda", dtype=dtype, kv_format=kv_format)
    both = plain.keys() & ours.keys()
    assert len(both) >= 4
    assert max(abs(plain[token_id] - ours[token_id]) for token_id in both) < tolerance
