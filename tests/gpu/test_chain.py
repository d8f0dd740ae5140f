"""The whole chain on one GPU through the plain entry point: dense, upcycled, trained, resumed, reported.

Transformer Engine's layers, grouped GEMM, bf16, the hooks and metrics on, with the preset and without.
"""

# ruff: noqa: SIM905  (flags read better as a command line)
from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpu_starts import losses, run_command, train

pytestmark = pytest.mark.gpu

MODEL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--lr-decay-style constant --use-distributed-optimizer --log-interval 1 --eval-iters 1 --eval-interval 100 "
    "--seed 7 --num-workers 1 --lr-decay-iters 100"
).split()
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 "
    "--moe-per-layer-logging --moe-ext-observe-interval 2"
).split()


# Together with the preset's fused norm, recompute of the norm once read freed memory (core/recompute-residual).
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "moe_act")


def _train(*flags: str) -> str:
    return train("cuda", *MODEL, *flags)


@dataclass(frozen=True)
class Trainings:
    """What needs nothing before it, started all at once: a start takes half a minute, and the models are small."""

    folder: Path
    dense: Future[str]
    plain: Future[str]
    preset: Future[str]
    selective: Future[str]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("dense")
    dense = ("--train-iters", "6", "--save", str(folder / "checkpoints"), "--save-interval", "6")
    eight = (*MOE, "--train-iters", "8")
    preset = (*eight, "--moe-ext-preset", "hopper")
    with ThreadPoolExecutor() as pool:
        yield Trainings(
            folder,
            pool.submit(_train, *dense, "--moe-ext-run-dir", str(folder / "run"), "--moe-ext-no-trackio"),
            pool.submit(_train, *eight, "--no-gradient-accumulation-fusion"),
            pool.submit(_train, *preset),
            pool.submit(_train, *preset, *SELECTIVE),
        )


def test_preset_trains_as_plain_flags_do(trainings: Trainings) -> None:
    plain = losses(trainings.plain.result())
    assert len(plain) == 8
    for training in (trainings.preset, trainings.selective):
        of_preset = losses(training.result())
        assert len(of_preset) == 8
        assert of_preset == pytest.approx(plain, rel=5e-3)


def test_dense_upcycle_train_resume_report(trainings: Trainings, tmp_path: Path) -> None:
    assert len(losses(trainings.dense.result())) == 6
    dense = trainings.folder
    run, saved = tmp_path / "moe", tmp_path / "moe" / "checkpoints"
    flags = (*MOE, "--moe-ext-preset", "hopper", "--moe-ext-run-dir", str(run), "--moe-ext-no-trackio")
    saving = ("--save", str(saved), "--save-interval", "6")
    upcycling = ("--load", str(dense / "checkpoints"), "--moe-use-upcycling")
    # The schedule is the checkpoint's, so the first run ends early instead of asking for fewer steps.
    first = _train(*flags, *saving, *upcycling, "--train-iters", "10", "--exit-interval", "6")
    assert "[moe] added --moe-permute-fusion" in first
    second = _train(*flags, *saving, "--train-iters", "10", "--load", str(saved))
    assert len(losses(first)) == 6
    assert len(losses(second)) == 4
    assert all(math.isfinite(loss) for loss in losses(first + second))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = {key for row in rows for key in row["metrics"]}
    assert {row["step"] for row in rows} >= set(range(1, 11))
    assert any(key.startswith("moe/max_vio") for key in seen), sorted(seen)
    assert any(key.startswith("moe/expert_norm") for key in seen), sorted(seen)
    counts = [json.loads(line)["tokens_per_expert"] for line in (run / "routing.jsonl").read_text().splitlines()]
    assert counts
    # 8 sequences of 256 tokens, top-2, in each of 4 layers: every choice is counted once.
    assert all(sum(layer) == 8 * 256 * 2 for frame in counts for layer in frame)
    command = [sys.executable, "-m", "megatron_ext.cli", "report", str(dense / "run"), str(run)]
    page = tmp_path / "report.html"
    run_command([*command, "-o", str(page)])
    assert page.stat().st_size > 10_000
