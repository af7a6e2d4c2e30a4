"""The MTP layer against an oracle assembled from transformers' own decoder layer.

transformers does not run GLM's MTP. The oracle loads a copy of the checkpoint whose MTP layer counts as one more
decoder layer, and puts the four MTP tensors around it by the formula: enorm and hnorm, eh_proj over (embedding,
hidden), the layer, shared_head.norm, the target's head; g is recycled.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from specdec.kernels.row_padding import pad_rows
from specdec.models.glm.checkpoint import load_checkpoint
from specdec.models.glm.config import GlmConfig
from specdec.models.glm.mtp import MtpLayer
from specdec.models.glm.target import GlmTarget
from tests.support.passes import OneRequest, run_target
from tests.support.tiny_checkpoint import read_tensors, reference_model, tiny_spec, write_tiny_checkpoint

NUM_PROMPT = 40
NUM_DRAFTS = 5
EPS = 1e-6


class MtpOracle:
    """Drafts greedily by running the reference layer over the whole sequence of (embedding, hidden) pairs each time."""

    def __init__(self, path: Path, scratch: Path) -> None:
        tensors = read_tensors(path)
        config = json.loads((path / "config.json").read_text())
        depth = config["num_hidden_layers"]
        own = {
            name: tensors.pop(f"model.layers.{depth}.{name}.weight")
            for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        }
        self.enorm, self.hnorm, self.eh_proj, self.shared_head_norm = own.values()
        config["num_hidden_layers"] = depth + 1
        config["num_nextn_predict_layers"] = 0
        parsed = GlmConfig.from_dict(json.loads((path / "config.json").read_text()))
        config["mlp_layer_types"] = [*parsed.mlp_layer_types, "sparse"]
        config["indexer_types"] = [*parsed.indexer_types, "full"]
        scratch.mkdir()
        (scratch / "config.json").write_text(json.dumps(config))
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        self.model: Any = reference_model(scratch)
        self.layer = self.model.model.layers[depth]
        self.config = config

    def target_hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        kept, self.model.config.num_hidden_layers = (
            self.model.config.num_hidden_layers,
            len(self.model.model.layers) - 1,
        )
        hidden = self.model.model(token_ids[None]).last_hidden_state[0]
        self.model.config.num_hidden_layers = kept
        return hidden

    def g(self, next_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        eps = self.config["rms_norm_eps"]
        embedded = F.rms_norm(self.model.model.embed_tokens(next_ids), (hidden.shape[-1],), self.enorm, eps)
        z = torch.cat((embedded, F.rms_norm(hidden, (hidden.shape[-1],), self.hnorm, eps)), dim=-1) @ self.eh_proj.T
        positions = torch.arange(len(next_ids))[None]
        mask = torch.full((len(next_ids), len(next_ids)), -torch.inf).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(z[None], position_ids=positions)
        u = self.layer(z[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)[0][0]
        return F.rms_norm(u, (hidden.shape[-1],), self.shared_head_norm, eps)

    def drafts(self, token_ids: torch.Tensor, bonus: int) -> tuple[torch.Tensor, list[int]]:
        hidden = self.target_hidden(token_ids)
        next_ids = torch.cat((token_ids[1:], torch.tensor([bonus])))
        logits, ids = [], []
        for _ in range(NUM_DRAFTS):
            g = self.g(next_ids, hidden)
            logits.append(self.model.lm_head(g[-1]))
            ids.append(int(logits[-1].argmax()))
            next_ids = torch.cat((next_ids, torch.tensor(ids[-1:])))
            hidden = torch.cat((hidden, g[-1:]))
        return torch.stack(logits), ids


@pytest.mark.parametrize("preset", ["share", "all_full", "groups", "real_dims"])
@pytest.mark.parametrize("chunks", [[NUM_PROMPT], [7, 1, 13, 19]], ids=["whole", "chunked"])
def test_mtp_logits_and_five_recycled_drafts_equal_the_oracle(preset: str, chunks: list[int], tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", tiny_spec(preset))
    oracle = MtpOracle(path, tmp_path / "oracle")
    token_ids = torch.randint(0, 400, (NUM_PROMPT,), generator=torch.Generator().manual_seed(3))
    loaded = load_checkpoint(path, dtype=torch.float32)
    target = GlmTarget(loaded.config, loaded.parameters, latent_norm_eps=EPS)
    mtp = MtpLayer(loaded.config, loaded.parameters, target, latent_norm_eps=EPS)
    request = OneRequest(loaded.config, num_tokens=NUM_PROMPT + NUM_DRAFTS)

    hidden_TH, _ = run_target(target, request, token_ids, chunks=chunks)
    bonus = int(target.logits(hidden_TH[-1:]).argmax())
    next_ids = torch.cat((token_ids[1:], torch.tensor([bonus])))
    begin = 0
    for size in chunks:
        rows = slice(begin, begin + size)
        metadata = request.metadata(request.draft_pool, range(begin, begin + size))
        output = mtp.forward(
            pad_rows(next_ids[rows]), pad_rows(hidden_TH[rows]), metadata=metadata, pool=request.draft_pool
        )
        g_1H = output.g_TH[size - 1 : size]
        begin += size

    logits, ids = [], []
    for step in range(NUM_DRAFTS):
        logits.append(target.logits(g_1H)[0])
        ids.append(int(logits[-1].argmax()))
        metadata = request.metadata(request.draft_pool, [NUM_PROMPT + step])
        g_1H = mtp.forward(
            pad_rows(torch.tensor(ids[-1:])), pad_rows(g_1H), metadata=metadata, pool=request.draft_pool
        ).g_TH[:1]

    expected_logits, expected_ids = oracle.drafts(token_ids, bonus)
    torch.testing.assert_close(torch.stack(logits), expected_logits, atol=1e-4, rtol=0)
    assert ids == expected_ids
