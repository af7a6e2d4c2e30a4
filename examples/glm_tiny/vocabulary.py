"""Train the byte-level BPE and append GLM's 36 special tokens in their order."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 3072
SPECIAL_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "/nothink", "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>",
)  # fmt: skip
# Text that a decoder must keep: reasoning and tool calls are parsed from it.
KEPT_IN_TEXT = frozenset(SPECIAL_TOKENS[21:32])
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
# A word with its leading blank, one digit, a run of signs, or white space. Single digits make numbers easy to copy.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train on `texts`; the result has exactly `vocab_size` ids, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=t not in KEPT_IN_TEXT, normalized=False) for t in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocabulary must have {vocab_size} entries, got {tokenizer.get_vocab_size()}: more text needed"
        )
    return tokenizer


def require_id(tokenizer: Tokenizer, token: str) -> int:
    """Give the id of a token that must be there; KeyError names it otherwise."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise KeyError(f"the vocabulary has no token {token!r}")
    return token_id


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as Hugging Face reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(require_id(tokenizer, token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token not in KEPT_IN_TEXT,
            }
            for token in SPECIAL_TOKENS
        },
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in KEPT_IN_TEXT],
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
