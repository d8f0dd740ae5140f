"""Real training on four CPU ranks: the same losses with `alltoall`, `dedup` and `twohop` over two emulated nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 100,0,0
--eval-iters 0 --eval-interval 1000 --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 32 --swiglu
--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--expert-model-parallel-size 4 --normalization RMSNorm --position-embedding-type rope --log-interval 1
--seed 7 --num-workers 0 --use-cpu-initialization --log-throughput
"""
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"


@dataclass(frozen=True)
class Trained:
    """Losses of every step, as printed (seven digits), and the log."""

    losses: tuple[float, ...]
    log: str


def train(root: Path, flags: str, steps: int) -> Trained:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += ["-m", "megatron_ext.cli", "train", "--device", "cpu", "--", *MODEL.split(), *flags.split()]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environ["PYTHONPATH"] = f"{root}:{root / 'build' / 'megatron'}"
    done = subprocess.run(
        [*command, "--train-iters", str(steps)], env=environ, capture_output=True, text=True, timeout=550
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-5000:]
    losses = tuple(float(loss) for loss in re.findall(r"lm loss: (\S+)", log))
    assert len(losses) == steps, log[-5000:]
    return Trained(losses, log)


def _largest_gap(one: Trained, other: Trained) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


@pytest.mark.ranks
@pytest.mark.timeout(1700)
def test_fifty_steps_give_the_same_losses(root: Path, tmp_path: Path) -> None:
    right = train(root, "--moe-token-dispatcher-type alltoall", 50)
    assert right.losses[-1] < right.losses[0] - 0.5, "the model must learn for this to mean anything"
    nodes = "--moe-ext-dispatch-ranks-per-node 2"
    for name, flags in (
        ("dedup", f"{FLEX} dedup"),
        ("static", f"{FLEX} twohop {nodes} --moe-ext-dispatch-form static"),
        ("routed", f"{FLEX} twohop {nodes} --moe-ext-dispatch-form alltoallv"),
    ):
        trained = train(root, flags, 50)
        assert _largest_gap(trained, right) <= 2e-5, (name, trained.losses, right.losses)


@pytest.mark.timeout(580)
def test_twohop_trains_says_what_it_uses_and_counts_its_rows(root: Path, tmp_path: Path) -> None:
    flags = f"{FLEX} twohop --moe-ext-dispatch-ranks-per-node 2 --moe-ext-run-dir {tmp_path / 'run'}"
    trained = train(root, flags, 3)
    assert "asked for twohop, using twohop over gloo (rail hop: all-to-all-v); 4 ranks on 2 node(s) of 2" in trained.log
    assert "nodes of 2 ranks are emulated on 1 host(s)" in trained.log
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics: dict[str, float] = {}
    for line in lines:
        if line["step"] == 3:
            metrics |= line["metrics"]
    # Top-3 of 8 over two nodes: 1.5 choices a token leave the node, in about 0.93 rows.
    for layer in range(2):
        assert 0 < metrics[f"moe/rows_off_node/layer_{layer}"] <= 1
        assert metrics[f"moe/rows_off_node/layer_{layer}"] <= metrics[f"moe/choices_off_node/layer_{layer}"]
        assert metrics[f"moe/choices_off_node/layer_{layer}"] == pytest.approx(1.5, abs=0.5)
    assert metrics["step/dispatch_gib_off_node"] > 0
