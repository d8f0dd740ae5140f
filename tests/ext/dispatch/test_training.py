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

from megatron_ext.dispatch.publish import METRICS
from megatron_ext.plan.dispatch import Cluster, Layer, simulate

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


@pytest.mark.nightly
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
def test_twohop_trains_says_what_it_uses_and_counts_the_rows_that_the_simulator_plans(
    root: Path, tmp_path: Path
) -> None:
    flags = f"{FLEX} twohop --moe-ext-dispatch-ranks-per-node 2 --moe-ext-run-dir {tmp_path / 'run'}"
    trained = train(root, f"{flags} --moe-router-force-load-balancing", 3)
    assert "asked for twohop, using twohop over gloo (rail hop: all-to-all-v); 4 ranks on 2 node(s) of 2" in trained.log
    assert "nodes of 2 ranks are emulated on 1 host(s)" in trained.log
    assert "rows a token off the node, even routing: 0.929 at best, 1.500 with alltoall" in trained.log
    assert "NCCL_NET_PLUGIN/NCCL_NET" in trained.log
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics: dict[str, float] = {}
    for line in lines:
        if line["step"] == 3:
            metrics |= line["metrics"]
    # Top-3 of 8, four ranks on two nodes; 256 tokens are drawn, so 5 % is about three times the sampling error.
    layer, cluster = Layer(num_experts=8, top_k=3, hidden=64, tokens=64), Cluster(ep=4, ranks_per_node=2)
    planned = {one.name: one for one in simulate(layer, cluster, samples=20_000)}
    for number in range(2):
        measured = {name: metrics[f"moe/{name}/layer_{number}"] for name in METRICS}
        assert measured["rows_off_node"] == measured["rows_off_node_needed"]
        assert measured["rows_off_node"] == pytest.approx(planned["twohop"].rows_off_node, rel=0.05)
        assert measured["rows_off_rank"] == pytest.approx(planned["twohop"].rows_off_rank, rel=0.05)
        assert measured["choices_off_node"] == pytest.approx(planned["alltoall"].rows_off_node, rel=0.1)
    assert metrics["step/dispatch_gib_off_node"] > 0
