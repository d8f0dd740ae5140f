"""The verb end to end: files, splits, restarts, and what bad input leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron_ext.cli import main
from megatron_ext.data import labels_by_prefix, load_manifest
from megatron_ext.data.indexed import megatron_indexed
from megatron_ext.data.split import split_of
from tests.ext.data.conftest import tokenize, write_texts


def _texts(manifest_dir: Path, split: str) -> list[str]:
    manifest = load_manifest(manifest_dir)
    tokenizer = Tokenizer.from_file(str(manifest.tokenizer.path / "tokenizer.json"))
    found = []
    for shard in manifest.of_split(split):  # type: ignore[arg-type]
        dataset = megatron_indexed().IndexedDataset(str(shard.prefix))
        found += [tokenizer.decode(list(ids[:-1]), skip_special_tokens=False) for ids in dataset]
    return found


def test_megatron_reads_every_document_back_and_none_is_on_both_sides(corpus: Path) -> None:
    train, valid = _texts(corpus, "train"), _texts(corpus, "valid")
    assert len(train) + len(valid) == 40
    assert train
    assert valid
    assert not set(train) & set(valid)
    assert "Letter 7: the experts met at noon, née Ölund. " * 8 in train + valid
    assert {split_of(text, 0.3, 1234) for text in valid} == {"valid"}


def test_manifest_names_tokenizer_labels_counts_and_digests(corpus: Path) -> None:
    manifest = load_manifest(corpus)
    assert manifest.tokenizer.path == corpus / "tokenizer"
    assert (manifest.tokenizer.vocab_size, manifest.dtype) == (300, "uint16")
    assert manifest.tokenizer.eod_token == "<|endoftext|>"
    assert {(s.label, s.split) for s in manifest.shards} == {
        (a, b) for a in ("prose", "code") for b in ("train", "valid")
    }
    for shard in manifest.shards:
        assert shard.bin_bytes == 2 * shard.tokens
    assert labels_by_prefix(manifest)[str(corpus / "train" / "code_00000")] == "code"


def test_blend_files_are_what_megatron_parses(corpus: Path) -> None:
    from megatron.training.utils import get_blend_and_blend_per_split

    class Args:
        data_path = train_data_path = valid_data_path = test_data_path = None
        data_args_path: str | None = None
        per_split_data_args_path: str | None = str(corpus / "blend.json")

    train, valid, test = get_blend_and_blend_per_split(Args)[1]
    manifest = load_manifest(corpus)
    assert train == (
        [str(s.prefix) for s in manifest.of_split("train")],
        [s.tokens for s in manifest.of_split("train")],
    )
    assert valid[0] == [str(s.prefix) for s in manifest.of_split("valid")]
    assert test is None
    Args.per_split_data_args_path, Args.data_args_path = None, str(corpus / "train.args")
    assert get_blend_and_blend_per_split(Args)[0] == train


def test_a_path_with_a_space_goes_into_the_json_blend_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from megatron.training.utils import get_blend_and_blend_per_split

    out = tmp_path / "my data"
    assert tokenize(write_texts(tmp_path / "in"), out) == 0
    assert f"--per-split-data-args-path '{out}/blend.json'" in capfd.readouterr().out

    class Args:
        data_path = train_data_path = valid_data_path = test_data_path = data_args_path = None
        per_split_data_args_path = str(out / "blend.json")

    train, valid, _ = get_blend_and_blend_per_split(Args)[1]
    assert {*train[0], *valid[0]} == {str(shard.prefix) for shard in load_manifest(out).shards}
    assert not list(out.glob("*.args"))  # --data-args-path would cut them at the space
    assert main(["tokenize", "--check", str(out)]) == 0


def test_megatron_and_transformers_open_the_tokenizer_offline(corpus: Path) -> None:
    from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(str(corpus / "tokenizer"))
    record = load_manifest(corpus).tokenizer
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (record.vocab_size, record.eod_id)
    assert tokenizer.ids_to_text(tokenizer.text_to_ids("née  Ölund\n\tx")) == "née  Ölund\n\tx"


def test_same_input_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    assert tokenize(write_texts(tmp_path / "in"), tmp_path / "out") == 0
    ours, theirs = load_manifest(corpus), load_manifest(tmp_path / "out")
    assert ours.tokenizer.sha256 == theirs.tokenizer.sha256
    assert [s.bin_sha256 for s in ours.shards] == [s.bin_sha256 for s in theirs.shards]


def test_spelled_out_end_of_text_is_no_document_boundary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before <|endoftext|> after " * 5)
    assert tokenize(["--input", str(tmp_path / "a.txt")], tmp_path / "out", "--held-out", "0") == 0
    assert main(["tokenize", "--check", str(tmp_path / "out")]) == 0


def test_second_run_changes_nothing(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in corpus.rglob("*") if p.is_file()}
    inputs = [
        "--input",
        f"prose={corpus.parent / 'in/prose'}",
        "--input",
        f"code={corpus.parent / 'in/code.jsonl'}",
    ]
    assert tokenize(inputs, corpus) == 0
    assert "up to date" in capfd.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in corpus.rglob("*") if p.is_file()} == before


def test_other_corpus_is_not_overwritten_unless_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = write_texts(tmp_path / "in")
    assert tokenize(inputs, tmp_path / "out") == 0
    first = load_manifest(tmp_path / "out")
    assert tokenize(inputs, tmp_path / "out", "--seed", "5") == 1
    assert "--overwrite" in capfd.readouterr().err
    assert load_manifest(tmp_path / "out") == first
    assert tokenize(inputs, tmp_path / "out", "--seed", "5", "--overwrite") == 0
    assert load_manifest(tmp_path / "out").seed == 5


def test_tasks_of_a_job_array_meet_in_one_manifest(corpus: Path, tmp_path: Path) -> None:
    inputs = write_texts(tmp_path / "in")
    base = [
        "tokenize",
        *inputs,
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        str(corpus / "tokenizer"),
        "--held-out",
        "0.3",
        "--tasks",
        "3",
    ]
    for task in ("2", "0"):
        assert main([*base, "--task", task]) == 0
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert main([*base, "--task", "1"]) == 0
    # The single JSON-lines file is dealt out by document, the twenty text files by file: each document once.
    assert sorted(_texts(tmp_path / "out", "train")) == sorted(_texts(corpus, "train"))
    assert sorted(_texts(tmp_path / "out", "valid")) == sorted(_texts(corpus, "valid"))


def test_killed_run_goes_on_where_it_stopped(corpus: Path, tmp_path: Path) -> None:
    inputs = write_texts(tmp_path / "in")
    words = [
        "tokenize",
        *inputs,
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        str(corpus / "tokenizer"),
        "--held-out",
        "0.3",
    ]
    # Dies as SIGKILL would, after the first label and in the middle of the second.
    program = (
        "import os, sys\nfrom megatron_ext.data import shards\nfrom megatron_ext.cli import main\n"
        "add = shards.ShardWriter.add\n"
        "def dying(self, ids):\n    add(self, ids)\n    if self._label == 'code': os._exit(9)\n"
        "shards.ShardWriter.add = dying\nmain(sys.argv[1:])\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, *words], check=False, capture_output=True).returncode
        == 9
    )
    out = tmp_path / "out"
    assert not (out / "manifest.json").exists()
    assert list(out.glob("*/.code*.tmp"))
    prose = (out / "train" / "prose_00000.bin").stat().st_mtime_ns
    assert main(words) == 0
    assert (out / "train" / "prose_00000.bin").stat().st_mtime_ns == prose
    assert not list(out.glob("*/.*.tmp"))
    assert sorted(_texts(out, "train")) == sorted(_texts(corpus, "train"))


BAD_INPUTS = {
    "empty file": (b"", "is empty", ["bad.txt"]),
    "only white space": (b" \n\t\n", "is empty", ["bad.txt"]),
    "not UTF-8": (b"fine so far \xff\xfe", "byte offset 12", ["bad.txt", "not UTF-8"]),
    "missing": (None, "cannot be read", ["bad.txt", "No such file"]),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_named_and_leaves_nothing(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content, what, more = BAD_INPUTS[case]
    bad = tmp_path / "bad.txt"
    if content is not None:
        bad.write_bytes(content)
    assert tokenize(["--input", str(bad)], tmp_path / "out") == 1
    error = capfd.readouterr().err
    for part in (what, *more, "try:"):
        assert part in error
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p != bad]


def test_bad_json_line_names_the_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for content, what in (
        ('{"text": "a"}\n{"text": }\n', "line 2"),
        ('{"body": "a"}\n', "it has: body"),
        ('{"text": "a"}\n["x"]\n', "it has: list"),
    ):
        (tmp_path / "in.jsonl").write_text(content)
        assert tokenize(["--input", str(tmp_path / "in.jsonl")], tmp_path / "out", "--held-out", "0") == 1
        assert what in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("x")
    (tmp_path / "in.txt").chmod(0)
    assert tokenize(["--input", str(tmp_path / "in.txt")], tmp_path / "out") == 1
    assert "in.txt" in capfd.readouterr().err


def test_directory_without_text_and_label_without_held_out_say_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    assert tokenize(["--input", str(tmp_path / "none")], tmp_path / "out") == 1
    assert "no text under a directory" in capfd.readouterr().err
    (tmp_path / "one.txt").write_text("a single document " * 20)
    assert tokenize(["--input", str(tmp_path / "one.txt")], tmp_path / "out", "--held-out", "0.001") == 1
    assert "no held-out document" in capfd.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--vocab-size", "256"],
        ["--held-out", "1"],
        ["--tokenizer", "x"],
        ["--tasks", "2", "--task", "0"],
        ["--input", "a b=x"],
    ],
)
def test_wrong_usage_exits_with_64(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 50)
    assert tokenize(["--input", str(tmp_path / "a.txt")], tmp_path / "out", *words) == 64


def test_builtin_corpus_is_bounded_disjoint_and_stable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["tokenize", "--builtin-corpus", str(tmp_path / "c"), "--json"]
    assert main(words) == 0
    sizes = json.loads(capfd.readouterr().out)["sizes"]
    assert 500_000 < sizes["prose"]["bytes"] <= 1_000_000
    assert 500_000 < sizes["code"]["bytes"] <= 1_500_000
    assert min(sizes["prose"]["documents"], sizes["code"]["documents"]) > 100
    modules = [
        {p.name.rpartition("-")[0].removeprefix("doc-") for p in (tmp_path / "c" / label).iterdir()}
        for label in ("prose", "code")
    ]
    assert not modules[0] & modules[1]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*-*")}
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*-*")} == before
