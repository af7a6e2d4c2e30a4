"""Text to ids and back, against the tokenizers library itself."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import CheckpointError, RequestError
from specdec.text.detokenizer import Detokenizer
from specdec.text.tokenizer import Tokenizer, check_text, eos_token_ids, text_of_bytes
from tests.support.byte_tokenizer import PLAIN_ADDED_TOKENS, SPECIAL_TOKENS, write_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


@pytest.fixture(scope="module")
def library(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(path))


@given(text=st.text())
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


# Any ids: halves of characters, bytes that are never UTF-8, special tokens, ids behind the vocabulary.
token_id_lists = st.lists(st.integers(0, 350), max_size=30)


@given(token_ids=token_id_lists, skip=st.booleans())
def test_decoding_is_that_of_the_library(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, token_ids: list[int], skip: bool
) -> None:
    expected = library.decode(token_ids, skip_special_tokens=skip)
    assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


@given(token_ids=token_id_lists, skip=st.booleans())
def test_streamed_pieces_join_to_the_whole_text(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(alphabet="aé你🙂 👩‍", max_size=12))
def test_no_piece_of_valid_text_holds_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    shown = ""
    for token_id in tokenizer.encode(text):
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert detokenizer.finish() == ""


def test_a_cut_character_becomes_a_replacement_only_at_the_end(tokenizer: Tokenizer) -> None:
    lead_byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")  # of four bytes
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    assert detokenizer.push(lead_byte) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.finish() == ""


def test_special_tokens_in_a_text_are_recognised_and_none_are_added(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    ids = tokenizer.encode("[gMASK]<sop><|user|>hi")
    assert ids[:3] == [library.token_to_id(token) for token in ("[gMASK]", "<sop>", "<|user|>")]
    assert tokenizer.encode("") == []
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"


def test_only_added_tokens_marked_special_are_skipped(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    assert tokenizer.special_token_ids == {library.token_to_id(token) for token in SPECIAL_TOKENS}
    text = "".join(PLAIN_ADDED_TOKENS)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_a_token_is_found_by_its_text_alone(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    assert tokenizer.token_id("<think>") == library.token_to_id("<think>")
    assert tokenizer.token_id("<think> ") is None


def test_the_vocabulary_ends_behind_the_highest_id(tokenizer: Tokenizer, library: tokenizers.Tokenizer) -> None:
    assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_half_a_surrogate_pair_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate .* at character 2"):
        tokenizer.encode("ab\ud83d")
    check_text("ab🙂")


def test_bytes_that_are_no_utf8_are_refused_with_their_place() -> None:
    with pytest.raises(RequestError, match="prompt must be UTF-8, got byte 0xff at offset 3"):
        text_of_bytes(b"abc\xff", source="prompt")
    assert text_of_bytes("é".encode(), source="prompt") == "é"


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"model": {"type": "Nothing"}}'])
def test_a_corrupt_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(CheckpointError, match="must be ByteLevel"):
        Tokenizer(path)


@pytest.mark.parametrize(("found", "expected"), [(None, (5,)), (7, (5, 7)), ([9, 5, 7], (5, 7, 9)), ([], (5,))])
def test_a_turn_ends_at_the_ids_of_either_config(
    tmp_path: Path, found: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(tmp_path, [5]) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    assert eos_token_ids(tmp_path, [5]) == expected


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}', '{"eos_token_id": true}']
)
def test_a_corrupt_list_of_ends_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        eos_token_ids(tmp_path, [5])
