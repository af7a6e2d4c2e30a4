import io
import json
from pathlib import Path

import numpy as np
import pytest

from specdec import Engine
from tests.specdec.cli.conftest import Run
from tests.support.tiny_checkpoint import read_tensors, tiny_spec, write_shards, write_tiny_checkpoint


def test_the_logprobs_are_those_of_the_logits(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "logits.npz"
    outcome = run("score", "--model", model, "--ids", "5,6,7,8,9", "--logits", path, "--json")
    assert outcome.exit_code == 0
    record = json.loads(outcome.out)
    with np.load(path) as file:
        token_ids, logprobs, logits_TV = file["token_ids"], file["logprobs"], file["logits"]
    assert record["token_ids"] == token_ids.tolist() == [5, 6, 7, 8, 9]
    assert record["logprobs"] == logprobs.tolist()
    assert record["sum_logprob"] == pytest.approx(sum(logprobs))
    assert record["mean_logprob"] == pytest.approx(np.mean(logprobs))
    assert (logits_TV.shape, logits_TV.dtype) == ((5, 512), np.float32)
    log_softmax_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(logprobs, log_softmax_TV[np.arange(4), token_ids[1:]], atol=1e-5)


def test_a_line_holds_a_token_and_its_logprob(run: Run, model: str) -> None:
    expected = Engine.from_pretrained(model).score([5, 6, 7], with_logits=True)
    lines = run("score", "--model", model, "--ids", "5,6,7").out.splitlines()
    assert lines == [f"6\t{expected.logprobs[0]:.6f}", f"7\t{expected.logprobs[1]:.6f}"]


def test_ids_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch, run: Run, model: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf5 6\n7\n")))
    outcome = run("score", "--model", model, "--ids", "-", "--json")
    assert json.loads(outcome.out)["token_ids"] == [5, 6, 7]


def test_logits_are_kept_only_where_they_are_asked_for(model: str) -> None:
    engine = Engine.from_pretrained(model, prefill_chunk_tokens=3)
    without, with_logits = engine.score([5, 6, 7, 8, 9]), engine.score([5, 6, 7, 8, 9], with_logits=True)
    assert without.logits_TV is None
    assert with_logits.logits_TV is not None
    assert with_logits.logits_TV.shape == (5, 512)
    assert without.logprobs == with_logits.logprobs


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_is_not_finite_is_an_error_and_never_printed(run: Run, tmp_path: Path, flags: tuple[str, ...]) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec())
    tensors = read_tensors(tmp_path)
    tensors["model.embed_tokens.weight"][6] = float("nan")
    write_shards(tmp_path, tensors, num_shards=1)
    outcome = run("score", "--model", tmp_path, "--ids", "5,6,7", *flags)
    assert outcome.exit_code == 1
    assert outcome.out == ""
    assert "log-probability of token 2, id 7, is nan: the model's logits are not finite" in outcome.err


def test_one_token_has_no_logprob(run: Run, model: str) -> None:
    record = json.loads(run("score", "--model", model, "--ids", "5", "--json").out)
    assert (record["logprobs"], record["mean_logprob"]) == ([], None)
