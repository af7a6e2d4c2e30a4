"""Checkpoints in the forms people have: they generate as they should, or are refused before anything runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.cli.main import main
from specdec.engine import Engine
from specdec.errors import CheckpointError
from specdec.result import GenerationResult
from tests.support.engines import SPARSE, Ask, drawn, greedy, prompt_of, serve, tokens, write_engine_checkpoint
from tests.support.tiny_checkpoint import TinySpec, read_tensors, reference_model, tiny_spec, write_shards

ASKS = [Ask(prompt_of(length), greedy(20)) for length in (4, 8, 9, 40)] + [Ask(prompt_of(12), drawn(1, 20))]


def generated(path: Path, **settings: Any) -> list[GenerationResult]:
    engine = Engine.from_pretrained(path, **{"num_draft_tokens": 3, "page_size": 4, "max_model_len": 128, **settings})
    return serve(engine, ASKS)


def test_mtp_layer_with_and_without_its_own_embedding_and_head(tmp_path: Path) -> None:
    results = []
    for mtp_copies in (False, True):
        path = write_engine_checkpoint(tmp_path / str(mtp_copies), replace(SPARSE, mtp_copies=mtp_copies))
        results.append(generated(path))
    without, with_copies = results
    assert tokens(without) == tokens(with_copies)
    assert [result.speculation for result in without] == [result.speculation for result in with_copies]
    assert sum(result.speculation.num_accepted_tokens for result in without) > 0


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1000]),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_is_named_before_anything_runs(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_engine_checkpoint(tmp_path / "model", replace(SPARSE, num_shards=3))
    shard = path / "model-00002-of-00003.safetensors"
    assert len(tokens(generated(path))) == len(ASKS)
    DAMAGES[damage](shard)
    with pytest.raises(CheckpointError, match=shard.name):
        generated(path)
    exit_code = main(["generate", "--model", str(path), "--prompt-ids", "1,2,3", "--max-tokens", "2"])
    out, err = capsys.readouterr()
    assert exit_code != 0
    assert out == ""
    assert shard.name in err


INDEXER_LISTS: dict[str, TinySpec] = {
    "every other layer shares": tiny_spec("share"),
    "no list: every layer owns one": tiny_spec("all_full"),
    "a list that contradicts the frequency": tiny_spec(
        "all_full", indexer_types=("full", "full", "shared", "full"), config_changes={"index_topk_freq": 2}
    ),
}


@pytest.mark.parametrize("name", INDEXER_LISTS)
def test_layers_that_share_an_indexer_generate_as_in_transformers(name: str, tmp_path: Path) -> None:
    path = write_engine_checkpoint(tmp_path, INDEXER_LISTS[name])
    model = reference_model(path)
    results = generated(path, latent_norm_eps=1e-6)
    for ask, result in zip(ASKS[:4], results[:4], strict=True):
        token_ids = torch.tensor([ask.prompt + result.token_ids[:-1]])
        with torch.inference_mode():
            likeliest = model(token_ids).logits[0, len(ask.prompt) - 1 :].argmax(dim=-1)
        assert result.token_ids == tuple(likeliest.tolist())


def test_full_layer_without_its_indexer_is_refused(tmp_path: Path) -> None:
    path = write_engine_checkpoint(tmp_path, SPARSE)
    tensors = {name: tensor for name, tensor in read_tensors(path).items() if ".0.self_attn.indexer." not in name}
    write_shards(path, tensors, num_shards=1)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.indexer.*layer 0 is 'full'"):
        generated(path)


def test_fp8_checkpoint_drafts_as_its_dequantised_twin(tmp_path: Path) -> None:
    """With scales of the MTP layer's experts, and a stray one of a head that it does not have."""
    spec = tiny_spec(num_layers=2, indexer_types=("full", "shared"))
    gain = 0.25  # a power of two: scaling weights or their scales gives the same bits
    fp8 = write_engine_checkpoint(tmp_path / "fp8", replace(spec, weights="fp8"), branch_gain=gain)
    stray = "model.layers.2.shared_head.head.weight_scale"
    write_shards(fp8, read_tensors(fp8) | {stray: torch.ones(4, 2)}, num_shards=2)
    twin = write_engine_checkpoint(tmp_path / "twin", replace(spec, weights="fp8_twin"), branch_gain=gain)
    from_fp8, from_twin = generated(fp8), generated(twin)
    assert tokens(from_fp8) == tokens(from_twin)
    assert [result.speculation for result in from_fp8] == [result.speculation for result in from_twin]
    accepted = sum(result.speculation.num_accepted_tokens for result in from_fp8)
    drafted = sum(result.speculation.num_draft_tokens for result in from_fp8)
    assert accepted > 0.05 * drafted
    report = Engine.from_pretrained(fp8).checkpoint.report
    assert list(report.ignored) == [stray]
    assert f"({report.num_scales:,} scales)" in report.summary()
