"""`check` and `verify_for_training`: each fault of a corpus is found and named."""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_ext.data import add_arguments, check, load_manifest, verify_for_training
from megatron_ext.data.indexed import megatron_indexed
from megatron_ext.data.tokenizer import train_tokenizer
from megatron_ext.errors import UserError


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus, tmp_path / "out"))


def _build(prefix: Path, documents: list[list[int]], dtype: type = numpy.uint16) -> Path:
    builder = megatron_indexed().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for ids in documents:
        builder.add_document(numpy.array(ids, dtype=dtype), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_good_corpus_reports_every_shard_even_after_moving(copy: Path) -> None:
    report = check(copy)
    assert [s.documents for s in report.shards] == [s.documents for s in load_manifest(copy).shards]
    assert 0 < max(s.largest_id for s in report.shards) < report.vocab_size


def test_prefixes_need_a_tokenizer_and_read_like_a_manifest(corpus: Path) -> None:
    prefix = corpus / "train" / "code_00000"
    with pytest.raises(UserError, match="against a tokenizer"):
        check([prefix])
    with pytest.raises(UserError, match="a shard's file is missing"):  # before a tokenizer is asked for
        check([corpus / "none"])
    assert check([prefix], corpus / "tokenizer").shards[0].documents > 0


def test_other_tokenizer_of_the_same_size_is_refused(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer(["an altogether different text, quite different " * 9], 300, tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"doesn't match the data[\s\S]*corpus\S*/out/tokenizer"):
        check(corpus, tmp_path / "tokenizer")


@pytest.mark.parametrize(
    ("documents", "what"),
    [
        ([[5, 6, 0], [7, 8]], "document 1[\\s\\S]*last id 8"),
        ([[5, 300, 0]], "outside the vocabulary[\\s\\S]*id 300"),
        ([[5, 0, 6, 0]], "end-of-text token inside"),
        ([[0], []], "document 1[\\s\\S]*last id nothing"),
    ],
)
def test_bad_documents_are_named(documents: list[list[int]], what: str, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        check([_build(tmp_path / "x", documents)], corpus / "tokenizer")


def test_negative_id_is_outside_the_vocabulary(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="id -3"):
        check([_build(tmp_path / "x", [[5, -3, 0]], numpy.int32)], corpus / "tokenizer")


def test_no_document_at_all(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no document"):
        check([_build(tmp_path / "x", [])], corpus / "tokenizer")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (_cut, "cut short"),
        (_flip, "changed since"),
        (Path.unlink, "is missing"),
    ],
)
def test_harmed_shard_is_found(harm: Any, what: str, copy: Path) -> None:
    harm(copy / "train" / "prose_00000.bin")
    with pytest.raises(UserError, match=what):
        check(copy)


def test_pair_of_two_shards_and_foreign_index(copy: Path) -> None:
    shutil.copy(copy / "train" / "code_00000.idx", copy / "train" / "prose_00000.idx")
    with pytest.raises(UserError, match="belong together"):
        check([copy / "train" / "prose_00000"], copy / "tokenizer")
    (copy / "train" / "prose_00000.idx").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(UserError, match="not a Megatron index"):
        check([copy / "train" / "prose_00000"], copy / "tokenizer")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"schema": 9}', '{"schema": 1}'])
def test_unreadable_manifest_is_an_error_with_a_remedy(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=r"manifest[\s\S]*try:"):
        load_manifest(file)


def _args(corpus: Path, **changes: Any) -> Namespace:
    values: dict[str, Any] = {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(corpus / "tokenizer"),
        "padded_vocab_size": 384,
        "seq_length": 16,
        "mock_data": False,
        "data_path": None,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": str(corpus / "blend.json"),
    }
    return Namespace(**{**values, **changes})


def test_training_flag_is_a_plain_path_or_none() -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]).moe_ext_manifest is None
    assert parser.parse_args(["--moe-ext-manifest", "m.json"]).moe_ext_manifest == "m.json"


def test_good_training_command_passes(corpus: Path) -> None:
    verify_for_training(load_manifest(corpus), _args(corpus))
    verify_for_training(
        corpus, _args(corpus, per_split_data_args_path=None, data_args_path=str(corpus / "train.args"))
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mock_data": True}, "mock data"),
        ({"tokenizer_model": "/nowhere"}, "not a directory with tokenizer.json"),
        ({"padded_vocab_size": 128}, "smaller than the data's"),
        ({"per_split_data_args_path": None}, "no data flag"),
        ({"per_split_data_args_path": None, "data_path": ["/else/where"]}, "not in the manifest"),
        ({"seq_length": 100_000}, "smaller than one sequence"),
    ],
)
def test_training_command_that_does_not_fit(changes: dict[str, Any], what: str, corpus: Path) -> None:
    with pytest.raises(UserError, match=what):
        verify_for_training(load_manifest(corpus), _args(corpus, **changes))


def test_training_with_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer(["something else entirely, else entirely " * 9], 300, tmp_path / "tokenizer")
    with pytest.raises(UserError, match="tokenizer doesn't match the data"):
        verify_for_training(load_manifest(corpus), _args(corpus, tokenizer_model=str(tmp_path / "tokenizer")))


def test_held_out_shard_among_the_training_data_is_refused(corpus: Path) -> None:
    words = ["1", str(corpus / "train" / "code_00000"), "1", str(corpus / "valid" / "code_00000")]
    with pytest.raises(UserError, match="held-out shard among"):
        verify_for_training(corpus, _args(corpus, per_split_data_args_path=None, train_data_path=words))


def test_harmed_shard_is_found_before_training(copy: Path) -> None:
    # The copy moved, so its own args files still name the old place: pass the prefixes.
    words = [str(copy / "train" / "code_00000")]
    _cut(copy / "train" / "code_00000.bin")
    with pytest.raises(UserError, match="cut short"):
        verify_for_training(copy, _args(copy, per_split_data_args_path=None, train_data_path=words))
