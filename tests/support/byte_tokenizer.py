"""A small byte-level BPE tokenizer with special tokens, as a checkpoint ships it."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
PLAIN_ADDED_TOKENS = ["<think>", "</think>", "<tool_call>"]
# Spelled with characters inside and outside the alphabet that stands for bytes.
ODD_ADDED_TOKENS = ["<é>", "<｜tool｜>", "two words"]
TEXT = [
    "def greet(name):\n    return f'Grüße, {name}! 你好, мир 🙂👩‍👩‍👧'\n",
    "the quick brown fox jumps over the lazy dog; das schnelle Füchslein springt über 東京 und 🏳️‍🌈 é́",
]


def write_tokenizer(path: Path, *, num_extra_tokens: int = 0) -> None:
    """Write tokenizer.json: 256 bytes, some merges (also inside characters), then the added tokens and extra ones."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(token, special=False) for token in PLAIN_ADDED_TOKENS + ODD_ADDED_TOKENS]
    )
    tokenizer.add_tokens([f"<extra {number}>" for number in range(num_extra_tokens)])
    tokenizer.save(str(path))
