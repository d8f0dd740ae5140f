"""Tokenizers: train a byte-level BPE, open a Hugging Face tokenizer directory, encode documents.

The directory that `train` writes (`tokenizer.json`, `tokenizer_config.json`) opens offline with transformers'
`AutoTokenizer`, which is what Megatron's `--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR` uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ext.data.files import sha256_file, write_json, write_text
from megatron_ext.errors import UserError

END_OF_TEXT = "<|endoftext|>"
# 256 bytes and the end-of-text token: anything smaller cannot write every text.
MINIMUM_VOCAB = 257


@dataclass(frozen=True)
class OpenTokenizer:
    """A tokenizer ready to encode: `vocab_size` counts added tokens, `eod_id` closes every document."""

    path: Path
    sha256: str
    vocab_size: int
    eod_token: str
    eod_id: int
    backend: Any

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids, the end-of-text id last and nowhere else."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*encoding.ids, self.eod_id] for encoding in encodings]


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> OpenTokenizer:
    """Train a byte-level BPE on `texts` and save it as a Hugging Face directory.

    The vocabulary may come out smaller than asked where the texts hold too few pairs that occur twice.

    Raises:
        UserError: `vocab_size` is below 257.
    """
    if vocab_size < MINIMUM_VOCAB:
        raise UserError(
            "the vocabulary is too small",
            where=f"--vocab-size {vocab_size}",
            why="256 bytes and the end-of-text token must fit",
            remedy=f"use at least {MINIMUM_VOCAB}",
            exit_code=64,
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": 1_000_000_000,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", config)
    # Last, so that a directory with tokenizer.json is a complete one.
    write_text(directory / "tokenizer.json", backend.to_str(pretty=False))
    return open_tokenizer(directory)


def open_tokenizer(directory: Path, eod_token: str | None = None) -> OpenTokenizer:
    """Open a Hugging Face tokenizer directory.

    Args:
        directory: Holds `tokenizer.json`; the end-of-text token comes from its configuration files.
        eod_token: Overrides that token.

    Raises:
        UserError: The directory or its file is missing or broken, or no end-of-text token is known.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            "no tokenizer there",
            where=str(file),
            remedy="name a Hugging Face tokenizer directory with --tokenizer, "
            "or make one with --train-tokenizer --vocab-size N",
        )
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises plain Exception for every kind of broken file.
        raise UserError(
            "the tokenizer file is broken",
            where=str(file),
            why=str(error),
            remedy="copy or train it again",
        ) from error
    # A document that spells the end-of-text token out must not gain a document boundary in its middle.
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    token = eod_token or _configured_eod(directory)
    eod_id = backend.token_to_id(token) if token else None
    if token is None or eod_id is None:
        raise UserError(
            "the tokenizer has no end-of-text token",
            where=str(directory),
            why=f"{token!r} is not in its vocabulary" if token else "no eos_token in its configuration",
            remedy="name it with --eod-token, e.g. --eod-token '<|end_of_text|>'",
        )
    size = backend.get_vocab_size(with_added_tokens=True)
    return OpenTokenizer(directory.resolve(), sha256_file(file), size, token, eod_id, backend)


def _configured_eod(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if not file.is_file():
            continue
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise UserError(
                "the tokenizer's configuration is broken",
                where=str(file),
                why=str(error),
                remedy="copy the directory again",
            ) from error
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return None
