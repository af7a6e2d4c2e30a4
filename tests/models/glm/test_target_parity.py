"""The target against `GlmMoeDsaForCausalLM` of transformers, in float32, far beyond `index_topk`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.target import GlmTarget
from tests.support.passes import OneRequest, run_target
from tests.support.tiny_checkpoint import reference_model, tiny_spec, write_tiny_checkpoint

NUM_TOKENS = 60
REFERENCE_LATENT_NORM_EPS = 1e-6  # a class default in transformers
CHUNKINGS = {"whole": [NUM_TOKENS], "chunked": [7] * 8 + [4], "token-by-token": [1] * NUM_TOKENS}


class Reference:
    """What transformers computed for one prompt: logits, hidden states and every discrete choice."""

    def __init__(self, path: Path, token_ids: torch.Tensor) -> None:
        model: Any = reference_model(path)
        self.selected: dict[int, torch.Tensor] = {}
        self.experts: dict[int, torch.Tensor] = {}
        self.hidden: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda _m, _i, out, number=number: self._keep_layer(number, out))
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda _m, _i, out, number=number: self._keep_experts(number, out))
        with torch.no_grad():
            self.logits = model(token_ids[None]).logits[0]

    def _keep_layer(self, number: int, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.hidden[number] = out[0][0]
        self.selected[number] = out[1][0]

    def _keep_experts(self, number: int, out: tuple[torch.Tensor, ...]) -> None:
        self.experts[number] = out[2]


@pytest.fixture(scope="module", params=["share", "all_full", "groups", "real_dims"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp(request.param) / "model", tiny_spec(request.param))
    token_ids = torch.randint(0, 400, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7))
    return load_checkpoint(path, dtype=torch.float32), Reference(path, token_ids), token_ids


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_logits_hidden_states_selections_and_experts_equal_the_reference(case: Any, chunking: str) -> None:
    loaded, reference, token_ids = case
    target = make_target(loaded)
    request = OneRequest(loaded.config, num_tokens=NUM_TOKENS)
    hidden_TH, traces = run_target(target, request, token_ids, chunks=CHUNKINGS[chunking])
    assert 2 < reference.logits.std() < 4  # a spread at which 1e-4 means something
    torch.testing.assert_close(target.logits(hidden_TH), reference.logits, atol=1e-4, rtol=0)
    for layer in range(loaded.config.num_layers):
        layer_hidden = torch.cat([trace.hidden_TH[layer] for trace in traces])
        torch.testing.assert_close(layer_hidden, reference.hidden[layer], atol=1e-4, rtol=1e-4)
        selected = torch.cat([trace.selected_TK[layer] for trace in traces])
        for position in range(NUM_TOKENS):
            ours = set(selected[position].tolist()) - {-1}
            assert ours == {s for s in reference.selected[layer][position].tolist() if s <= position}
        if layer in reference.experts:
            experts = torch.cat([trace.expert_TC[layer] for trace in traces])
            assert torch.equal(experts.sort(dim=1).values, reference.experts[layer].sort(dim=1).values)


def test_every_chunking_gives_the_same_bits(case: Any) -> None:
    loaded, _, token_ids = case
    target = make_target(loaded)
    whole, *others = (
        run_target(target, OneRequest(loaded.config, num_tokens=NUM_TOKENS), token_ids, chunks=chunks)[0]
        for chunks in CHUNKINGS.values()
    )
    assert all(torch.equal(whole, other) for other in others)


def make_target(loaded: LoadedCheckpoint) -> GlmTarget:
    return GlmTarget(loaded.config, loaded.parameters, latent_norm_eps=REFERENCE_LATENT_NORM_EPS)


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_rounded_checkpoint_equals_its_float32_twin(weights: str, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", tiny_spec("share", weights=weights, num_shards=3))
    token_ids = torch.randint(0, 400, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7))
    loaded = load_checkpoint(path, dtype=torch.float32)
    target = make_target(loaded)
    hidden_TH, _ = run_target(
        target, OneRequest(loaded.config, num_tokens=NUM_TOKENS), token_ids, chunks=CHUNKINGS["chunked"]
    )
    torch.testing.assert_close(target.logits(hidden_TH), Reference(path, token_ids).logits, atol=1e-4, rtol=0)
