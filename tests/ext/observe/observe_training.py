"""Start real CPU training on N ranks over gloo with the monitor on, and read what it wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]

# Two layers, 8 experts, top-2; 4 sequences of 64 tokens a step.
SMALL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 100,0,0 --eval-iters 0 --eval-interval 1000
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --swiglu --disable-bias-linear
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--no-gradient-accumulation-fusion --normalization RMSNorm --position-embedding-type rope
--log-interval 1 --moe-ext-observe-interval 1 --seed 7 --num-workers 0 --use-cpu-initialization
"""


@dataclass(frozen=True)
class Output:
    """What a training left: the sink's files and the log of all ranks."""

    folder: Path
    log: str

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def metrics(self, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in self.lines("metrics"):
            if line["step"] == step:
                found |= line["metrics"]
        return found

    def counts(self, step: int) -> np.ndarray:
        (frame,) = [line for line in self.lines("routing") if line["step"] == step]
        return np.array(frame["tokens_per_expert"])

    def dumps(self, kind: str) -> list[dict[str, np.ndarray]]:
        return [dict(np.load(path)) for path in sorted(self.folder.glob(f"{kind}-*.npz"))]


def train(
    folder: Path,
    flags: str = "",
    *,
    without: tuple[str, ...] = (),
    ranks: int = 1,
    plugin: str = "",
    ok: bool = True,
    **more: Any,
) -> Output:
    """Train SMALL with `flags` put behind it (Megatron takes the last), leaving the words `without` out."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.json"
    spec.write_text(json.dumps(specification(folder, flags, without=without, plugin=plugin, **more)))
    port = _free_port()
    # Into files: a full pipe of one rank would stop it while another is waited for.
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = [_start(spec, rank, ranks, port, log) for rank, log in enumerate(logs)]
    try:
        failed = sum(abs(process.wait(timeout=400)) for process in processes) > 0
    finally:
        for process in processes:
            process.kill()
    log = "\n".join(path.read_text() for path in logs)
    assert failed != ok, log[-6000:]
    return Output(folder, log)


def specification(
    folder: Path, flags: str, *, without: tuple[str, ...] = (), plugin: str = "", **more: Any
) -> dict[str, Any]:
    """Return what `observe_child.train_rank` takes."""
    words = [word for word in SMALL.split() if word not in without] + flags.split()
    return {"flags": words, "folder": str(folder), "plugin": plugin, **more}


def _start(spec: Path, rank: int, ranks: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("observe_child.py")), str(spec)]
    with open(log, "wb") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
