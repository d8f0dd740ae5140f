"""Training starts of one or more ranks that wait at a gate: their imports cost the run before them nothing.

For benchmarks that start Megatron several times on one machine. A run is ended (killed) as soon as it has printed its
last step: a shutdown takes seconds and tells nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Job:
    """A training start: words after `gated_start.py GATE`, the environment, and a GPU for each rank.

    Args:
        name: Of the run, for people.
        words: Script and arguments, the same on every rank.
        environment: What is added to this process's own, the same on every rank.
        gpus: One device number a rank (ignored on the CPU).
        steps: The last step; the words must have memory printed after it (`--log-memory-interval`).
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    gpus: tuple[int, ...]
    steps: int


@dataclass
class Started:
    """A job whose ranks wait at their gate, or run."""

    job: Job
    folder: Path
    ranks: list[subprocess.Popen[bytes]]
    opened: float = 0.0  # when the gate was opened, on the monotonic clock

    @property
    def log(self) -> str:
        """What its ranks have printed so far, rank by rank: Megatron's last rank prints the steps, the first memory."""
        paths = [self.folder / f"rank{rank}.txt" for rank in range(len(self.ranks))]
        return "".join(path.read_text(errors="replace") for path in paths)

    def open_gate(self) -> None:
        """Let the ranks go on, with the port where they shall meet: one chosen at their start may be taken by now."""
        self.opened = time.monotonic()
        written = self.folder / "go.new"
        written.write_text(str(_free_port()))
        written.rename(self.folder / "go")

    def complete(self) -> bool:
        """Whether the last step has been printed, and the memory after it: another rank's line, or a later one."""
        steps, log = self.job.steps, self.log
        step = re.search(rf"iteration +{steps}/ +{steps} \|.*\n", log)
        return bool(step and re.search(rf"\(after {steps} iterations\) memory .*\n", log))

    def wait(self, limit: float) -> float | None:
        """Wait for the last step and end the ranks; seconds since the gate, or None where a rank ended or time did."""
        complete = False
        while not complete and time.monotonic() - self.opened < limit and not self.ended():
            time.sleep(0.1)
            complete = self.complete()
        seconds = time.monotonic() - self.opened
        # A rank that ends by itself right after the last step has printed it all the same.
        complete = complete or self.complete()
        self.kill()
        return seconds if complete else None

    def ended(self) -> bool:
        """Whether any rank is gone."""
        return any(rank.poll() is not None for rank in self.ranks)

    def kill(self) -> None:
        """End all ranks and wait until they are gone, so that their memory is free."""
        for rank in self.ranks:
            # Its data loader's workers too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.wait()


def start(job: Job, folder: Path) -> Started:
    """Start the ranks of a job up to their gate, `folder/go`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go").unlink(missing_ok=True)
    world = len(job.gpus)
    command = [sys.executable, str(ROOT / "benchmarks" / "gated_start.py"), str(folder / "go"), *job.words]
    ranks = []
    for rank, gpu in enumerate(job.gpus):
        # A rank finds its GPU by LOCAL_RANK. One GPU a job is made the only one, so that two jobs can share a machine.
        alone = {"CUDA_VISIBLE_DEVICES": _visible(gpu)} if world == 1 else {}
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "PYTHONUNBUFFERED": "1", **alone, **job.environment}
        environment |= {name: str(value) for name, value in place.items()}
        with (folder / f"rank{rank}.txt").open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    return Started(job, folder, ranks)


def _visible(gpu: int) -> str:
    """Return the name of the device that this process knows as number `gpu`."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[gpu] if gpu < len(visible) else str(gpu)


def be_the_only_rank() -> None:
    """Set what torchrun would set for a single rank, for a benchmark that trains in its own process."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": _free_port()}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def failure(text: str, size: int = 3000) -> str:
    """Return where a failed log says why: its first traceback's last line, and its end."""
    errors = re.findall(r"^\S*(?:Error|Exception)\b.*$", text, re.MULTILINE)
    return "\n".join([*dict.fromkeys(error[:400] for error in errors[:3]), text[-size:]])


def values(pattern: str, text: str) -> list[float]:
    """Return the numbers that a pattern's group matched."""
    return [float(value) for value in re.findall(pattern, text)]


@dataclass(frozen=True)
class Steps:
    """Megatron's own figures of a run, medians after the first `skip` steps.

    Args:
        tflops: TFLOP/s a GPU; nan where it was not logged.
        step_ms: Milliseconds a step, with the least and the most.
        peak_mib: `max allocated` of the rank that printed it (rank 0), MiB.
        reserved_mib: `max reserved`, likewise.
        losses: Of every step.
        grad_norms: Of every step, as Megatron prints them, to three decimals (records made earlier have none).
    """

    tflops: float
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    peak_mib: float
    reserved_mib: float
    losses: list[float]
    grad_norms: list[float] = field(default_factory=list, kw_only=True)


def parse(text: str, skip: int) -> Steps:
    """Read Megatron's step lines."""
    nothing = [float("nan")]
    ms = values(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)[skip:]
    tflops = values(r"throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)", text)[skip:] or nothing
    return Steps(
        statistics.median(tflops), statistics.median(ms), min(ms), max(ms),
        max(values(r"max allocated: ([0-9.]+)", text) or nothing),
        max(values(r"max reserved: ([0-9.]+)", text) or nothing),
        values(r"lm loss: ([0-9.E+-]+)", text),
        grad_norms=values(r"grad norm: ([0-9.]+|nan|inf)", text),
    )  # fmt: skip


def machine(device: str) -> dict[str, str]:
    """Return the card and the versions that a figure belongs to."""
    from importlib.metadata import version

    import torch

    found = {
        "card": platform.processor() or "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        cards = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
        found["card"] = "; ".join(card for card in cards if card)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["transformer_engine"] = version("transformer_engine")
    return found


def python_path(*first: Path) -> str:
    """Return PYTHONPATH with some trees in front of what it has."""
    return os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])


@contextlib.contextmanager
def ended_at_exit() -> Iterator[list[Started]]:
    """Give a list; whatever was put there is ended at the end, at an error and at SIGTERM too."""
    started: list[Started] = []
    stock = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield started
    finally:
        for run in started:
            run.kill()
        signal.signal(signal.SIGTERM, stock)
