"""Specialization by source: two labelled data sets, real training, counts held against the batches that were read."""

from __future__ import annotations

import numpy as np
import pytest
from observe_training import train

from megatron_ext.errors import UserError
from megatron_ext.observe import sources


def write_texts(root):
    root.mkdir()
    (root / "prose.txt").write_text("The experts met at noon and spoke of tokens and of loads for a long while. " * 400)
    (root / "code.txt").write_text("def route(token):\n    return table[token % 8] * weight\n" * 400)
    return [f"prose={root / 'prose.txt'}", f"code={root / 'code.txt'}"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from megatron_ext.cli import main

    folder = tmp_path_factory.mktemp("sources")
    inputs = [word for text in write_texts(folder / "texts") for word in ("--input", text)]
    corpus = folder / "corpus"
    words = ["tokenize", *inputs, "--output", str(corpus), "--train-tokenizer", "--vocab-size", "300"]
    assert main([*words, "--held-out", "0"]) == 0
    blend = next(corpus.glob("*train*args*"), None)
    from megatron_ext.data import load_manifest

    shards = load_manifest(corpus).shards
    data = " ".join(f"0.5 {shard.prefix}" for shard in shards)
    assert [shard.label for shard in shards] == ["prose", "code"], blend
    flags = f"--data-path {data} --moe-ext-manifest {corpus} --train-iters 2 --tokenizer-type HuggingFaceTokenizer "
    flags += f"--tokenizer-model {corpus / 'tokenizer'} --data-cache-path {folder / 'cache'}"
    ours = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127")
    return train(folder / "run", flags, without=ours, plugin="Sources")


def test_tokens_by_label_are_those_of_the_batches(run):
    frame = next(line for line in run.lines("routing") if line["step"] == 2)
    assert frame["sources"] == ["prose", "code"]
    for layer in (0, 1):
        expected = np.zeros((2, 8), int)
        batches = [dump["ids"] for dump in run.dumps("batch") if dump["step"] == 2]
        maps = [dump["map"] for dump in run.dumps("router") if dump["step"] == 2 and dump["layer"] == layer]
        assert len(batches) == len(maps) == 2
        for ids, routed in zip(batches, maps, strict=True):
            for token, row in enumerate(routed.astype(int)):
                expected[ids[token % len(ids)]] += row
        assert np.array(frame["tokens_per_source"][layer]).tolist() == expected.tolist()
        assert expected.sum(-1).min() > 0
        assert expected.sum(0).tolist() == run.counts(2)[layer].tolist()
        joint = expected / expected.sum()
        independent = joint.sum(0) * joint.sum(1, keepdims=True)
        bits = (joint * np.log2(np.where(joint > 0, joint, 1) / np.where(joint > 0, independent, 1))).sum()
        assert run.metrics(2)[f"moe/source_information/layer_{layer}"] == pytest.approx(bits, rel=1e-6)


def test_labels_follow_the_blends_order_and_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    labels = {str(tmp_path / "real" / "a"): "prose", str(tmp_path / "real" / "b"): "code"}
    assert sources.match([str(tmp_path / "link" / "b"), str(tmp_path / "real" / "a")], labels) == ("code", "prose")
    assert sources.match([str(tmp_path / "real" / "a"), str(tmp_path / "c")], labels) == ()


def test_a_wrong_number_of_labels_is_an_error_at_start(monkeypatch):
    monkeypatch.setattr(sources, "_prefixes", lambda args: ["a", "b", "c"])
    with pytest.raises(UserError, match="2 labels, 3 data sets"):
        sources.labels_of_run(None, "prose,code")
