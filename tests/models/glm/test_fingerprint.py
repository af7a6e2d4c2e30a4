"""Two engines exchange KV only where they compute the same: whatever differs shows in the fingerprint."""

from dataclasses import replace

import pytest
import torch

from specdec.models.glm.checkpoint import LoadedCheckpoint, load_checkpoint
from specdec.models.glm.expert_split import ExpertSplit
from specdec.models.glm.fingerprint import model_fingerprint
from specdec.models.glm.parameters import TensorParallel
from tests.support.engines import Checkpoints


def fingerprints(checkpoint: LoadedCheckpoint, *, latent_norm_eps: float | None = None) -> tuple[str, str]:
    return tuple(  # type: ignore[return-value]
        model_fingerprint(checkpoint.config, checkpoint.parameters, latent_norm_eps=latent_norm_eps, of_mtp=of_mtp)
        for of_mtp in (False, True)
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> LoadedCheckpoint:
    return checkpoints.load("parallel")


def test_every_parameter_counts_for_the_model_or_for_the_mtp_layer(checkpoint: LoadedCheckpoint) -> None:
    model, mtp = fingerprints(checkpoint)
    for name, parameter in checkpoint.parameters.items():
        changed = replace(checkpoint, parameters={**checkpoint.parameters, name: parameter * 1.5 + 1.0})
        other_model, other_mtp = fingerprints(changed)
        assert (other_model != model, other_mtp != mtp) == (not name.startswith("mtp."), name.startswith("mtp.")), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split", list(ExpertSplit))
def test_the_leading_rank_has_the_same_whatever_the_number_of_ranks(
    checkpoints: Checkpoints, checkpoint: LoadedCheckpoint, size: int, split: ExpertSplit
) -> None:
    share = TensorParallel(rank=0, size=size, expert_split=split)
    sharded = load_checkpoint(checkpoints.path("parallel"), dtype=torch.float32, tensor_parallel=share)
    assert fingerprints(sharded) == fingerprints(checkpoint)


def test_rounding_and_the_numbers_of_the_config_count(checkpoints: Checkpoints, checkpoint: LoadedCheckpoint) -> None:
    model, mtp = fingerprints(checkpoint)
    config = checkpoint.config
    for other in (
        fingerprints(checkpoints.load("parallel", torch.bfloat16)),
        fingerprints(checkpoint, latent_norm_eps=2 * config.rms_norm_eps),
        fingerprints(replace(checkpoint, config=replace(config, rms_norm_eps=2 * config.rms_norm_eps))),
        fingerprints(replace(checkpoint, config=replace(config, routed_scaling_factor=1.125))),
        fingerprints(replace(checkpoint, config=replace(config, rope_theta=5.0))),
    ):
        assert other[0] != model
        assert other[1] != mtp
    assert fingerprints(checkpoint, latent_norm_eps=config.rms_norm_eps) == (model, mtp)
    longer = replace(config, max_position_embeddings=config.max_position_embeddings * 2, eos_token_ids=())
    assert fingerprints(replace(checkpoint, config=longer)) == (model, mtp)
