import functools
import json
from pathlib import Path

import pytest

from specdec.engine import Engine
from specdec.kernels.errors import CheckpointError
from specdec.models.glm.inspection import Inspection, inspect_model
from specdec.models.glm.template_facts import read_template_facts
from tests.support.byte_tokenizer import write_tokenizer
from tests.support.tiny_checkpoint import Weights, read_tensors, tiny_spec, write_tiny_checkpoint


@functools.cache
def release() -> Inspection:
    return inspect_model("glm-5.2-fp8")


def test_a_release_is_described_without_any_file() -> None:
    inspection = release()
    assert inspection.source == "config"
    assert (inspection.num_tensors, inspection.num_scales) == (118_629, 59_044)
    assert (inspection.size_bytes, inspection.num_parameters) == (755_617_140_416, 753_329_940_480)
    assert inspection.indexer_types.count("full") == 21
    assert inspection.has_mtp
    assert [token.token_id for token in inspection.stop_tokens] == [154_820, 154_827, 154_829]
    assert inspection.template is None
    mtp = next(part for part in inspection.components if part.component == "mtp")
    assert (mtp.num_tensors, round(mtp.num_parameters / 1e9, 2)) == (1569, 9.95)


@pytest.mark.parametrize(
    ("kv_format", "sizes"),
    [
        ("float32", (179_712, 10_752, 2_304, 512)),
        ("bfloat16", (89_856, 5_376, 1_152, 256)),
        ("fp8", (78 * 576, 21 * 132, 576, 132)),
        ("fp8_packed", (78 * 656, 21 * 132, 656, 132)),
    ],
)
def test_kv_bytes_per_token(kv_format: str, sizes: tuple[int, int, int, int]) -> None:
    kv = next(kv for kv in release().kv_bytes_per_token if kv.kv_format == kv_format)
    assert (kv.target_latent, kv.target_index_keys, kv.draft_latent, kv.draft_index_keys) == sizes
    assert kv.total == sum(sizes)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "fp8"])
def test_a_checkpoint_and_its_config_alone_give_the_same_sums(tmp_path: Path, weights: Weights) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", weights=weights, num_shards=2))
    stored, derived = inspect_model(tmp_path), inspect_model(tmp_path / "config.json")
    assert (stored.source, derived.source) == ("checkpoint", "config")
    assert stored.components == derived.components
    assert stored.kv_bytes_per_token == derived.kv_bytes_per_token
    tensors = read_tensors(tmp_path)
    assert stored.num_tensors == len(tensors) == sum(part.num_tensors for part in stored.components)
    assert stored.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_checkpoint_without_its_mtp_layer_keeps_no_draft_kv(tmp_path: Path) -> None:
    spec = tiny_spec("share", mtp=False, config_changes={"num_nextn_predict_layers": 1})
    inspection = inspect_model(write_tiny_checkpoint(tmp_path, spec))
    assert not inspection.has_mtp
    assert all(kv.draft_latent == kv.draft_index_keys == 0 for kv in inspection.kv_bytes_per_token)
    assert "no MTP layer" in inspection.warnings[0]


def test_a_format_that_does_not_fit_has_no_size(tmp_path: Path) -> None:
    spec = tiny_spec("share", qk_rope_head_dim=6, index_head_dim=6)
    inspection = inspect_model(write_tiny_checkpoint(tmp_path, spec))
    by_format = {kv.kv_format: kv.total for kv in inspection.kv_bytes_per_token}
    assert by_format["fp8"] is None
    assert by_format["bfloat16"] is not None


def test_ignored_tensors_and_keys_are_listed_with_their_reasons(tmp_path: Path) -> None:
    spec = tiny_spec("share", mtp_copies=True, config_changes={"banana": 1})
    inspection = inspect_model(write_tiny_checkpoint(tmp_path, spec))
    assert inspection.ignored_tensors.keys() == {
        "model.layers.4.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight",
    }
    assert inspection.ignored_keys["banana"] == "unknown key"


def test_stop_tokens_come_from_both_configs_with_their_texts(tmp_path: Path) -> None:
    spec = tiny_spec("share")
    write_tiny_checkpoint(tmp_path, spec)
    extra = spec.special_id("<|system|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": extra, "top_p": 0.5}))
    inspection = inspect_model(tmp_path)
    texts = [token.text for token in inspection.stop_tokens]
    assert texts == ["<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>"]
    assert inspection.generation_defaults == {"top_p": 0.5}


def test_a_damaged_checkpoint_is_refused_as_loading_would(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share", num_shards=2))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing"):
        inspect_model(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": true}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": [{"name": [1], "template": "x"}]}'),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_damaged_text_file_is_refused_as_generating_would(tmp_path: Path, file: str, content: str) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    if file == "tokenizer_config.json":
        (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / file).write_text(content)
    for read in (inspect_model, Engine.from_pretrained):
        with pytest.raises(CheckpointError, match=file):
            read(tmp_path)


def test_ids_beyond_the_vocabulary_are_warnings(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_spec("share"))
    assert inspect_model(tmp_path).warnings == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 512}')
    write_tokenizer(tmp_path / "tokenizer.json", num_extra_tokens=600)
    end, tokenizer = inspect_model(tmp_path).warnings
    assert "eos_token_id 512 is outside the vocabulary, vocab_size 512" in end
    assert "vocab_size in config.json is 512" in tokenizer


def test_the_description_is_json(tmp_path: Path) -> None:
    inspection = inspect_model(write_tiny_checkpoint(tmp_path, tiny_spec("share", weights="fp8")))
    values = json.loads(json.dumps(inspection.to_dict()))
    assert values["model_type"] == "glm_moe_dsa"
    assert values["architecture"]["index_topk"] == 8
    assert values["indexer_types"] == ["full", "shared", "full", "shared"]
    assert values["kv_bytes_per_token"][0]["total"] == inspection.kv_bytes_per_token[0].total
    assert values["template"]["uses_tools"] is True


TEMPLATE = """{# enable_thinking is only a comment here #}
{%- for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.content }}{% endfor -%}
{{ reasoning_effort or "max" }}"""


def test_template_facts_follow_the_variables_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    facts = read_template_facts(tmp_path)
    assert facts is not None
    assert facts.variables == ("messages", "reasoning_effort")
    assert facts.has_reasoning_effort
    assert facts.needs_loop_controls
    assert (facts.can_switch_thinking, facts.uses_tools) == (False, False)
    assert (facts.can_clear_thinking, facts.opens_thinking) == (False, False)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_template_inside_the_tokenizer_config_is_found(tmp_path: Path, *, as_list: bool) -> None:
    template = [{"name": "tool_use", "template": ""}, {"name": "default", "template": TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template if as_list else TEMPLATE}))
    facts = read_template_facts(tmp_path)
    assert facts is not None
    assert facts.file == "tokenizer_config.json"
    assert facts.has_reasoning_effort


def test_a_template_that_is_no_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("\n{% for %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: the chat template is not valid Jinja \(line 2"):
        read_template_facts(tmp_path)


def test_no_template_at_all(tmp_path: Path) -> None:
    assert read_template_facts(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read_template_facts(tmp_path) is None
