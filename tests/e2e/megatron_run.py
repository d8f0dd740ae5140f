"""Starting real Megatron in real processes over gloo, and reading what it printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Small enough that start-up is most of the time; two layers, since one hides every mistake about layers.
MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--ffn-hidden-size",
    "64",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
]
MOE = [
    "--num-experts",
    "8",
    "--moe-router-topk",
    "2",
    "--expert-model-parallel-size",
    "2",
    "--moe-token-dispatcher-type",
    "alltoall",
]
TRAIN = [
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--lr",
    "1e-2",
    "--lr-decay-style",
    "constant",
    "--use-distributed-optimizer",
    "--log-interval",
    "1",
    "--eval-interval",
    "100",
    "--eval-iters",
    "1",
    "--num-workers",
    "0",
]
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]


def command(flags: Sequence[str], *, ranks: int, device: str = "cpu") -> list[str]:
    """Return the words that start `megatron-moe train` on some ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "-m", "megatron_ext.cli", "train", "--device", device, "--", *flags]


def train(flags: Sequence[str], *, ranks: int = 2, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    """Run a training start to its end; stdout and stderr together in `.stdout`."""
    return subprocess.run(
        command(flags, ranks=ranks, device=device),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env=environment(),
        cwd=ROOT,
    )


def megatron_moe(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one of the command's other verbs to its end."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_ext.cli", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
        cwd=ROOT,
        check=False,
    )


def train_and_kill(
    flags: Sequence[str], *, after_step: int, log: Path, ranks: int = 2, ready: Callable[[], bool] = lambda: True
) -> None:
    """Start a training and SIGKILL all its processes once a step is logged and `ready` says so."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command(flags, ranks=ranks), stdout=out, stderr=out, env=environment(), cwd=ROOT, start_new_session=True
        )
        deadline = time.monotonic() + 240
        while after_step not in losses(log.read_text()) or not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no step {after_step}:\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        kill_tree(process.pid)
        process.wait(timeout=30)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and its descendants, children first known, as a lost node would."""
    import psutil

    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    # Trackio's feeder lives in a session of its own and ends by itself when its parent is gone.
    for member in family:
        if "megatron_ext.tracking.feed" not in " ".join(_words(member)):
            _signal(member)


def _words(process: object) -> list[str]:
    import psutil

    try:
        return process.cmdline()  # type: ignore[attr-defined,no-any-return]
    except psutil.Error:
        return []


def _signal(process: object) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]


def environment() -> dict[str, str]:
    """Return the environment of a rank: one thread each, ours first."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def losses(text: str) -> dict[int, str]:
    """Return step -> lm loss as printed (the last word for a step wins)."""
    found = re.findall(r"iteration +(\d+)/ +\d+ .*?lm loss: (\S+)", text)
    return {int(step): loss for step, loss in found}


def consumed(text: str) -> dict[int, int]:
    """Return step -> samples consumed as printed."""
    found = re.findall(r"iteration +(\d+)/ +\d+ .*?consumed samples: +(\d+)", text)
    return {int(step): int(samples) for step, samples in found}
