"""Peak memory of eleven configurations on two GPUs, under the preset: what a memory planner has to predict.

    python benchmarks/memory_runs.py --out FILE [--only NAME,NAME,...] [--device cpu]

Each is a training start of three steps through the plain entry point, on mock data, with two micro-batches a step and
the handbook's widths and vocabulary. Several run side by side where they fit: a process's own peak does not depend on
its neighbours. Routing is forced even where experts lie on two GPUs, since the rows a rank gets would vary otherwise.
Figures are rank 0's, as Megatron prints them: `max allocated` and `max reserved` after the last step, MiB.
`--device cpu` rehearses with a toy, whose figures mean nothing.
"""

# ruff: noqa: SIM905  (flags read better as a command line)
from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gated_run
from gpu_step import DEDUP, FORCED, MOCK, MODEL_ARGS, MOE_ARGS, PRESET_ARGS, SELECTIVE, TOY, TRAIN_ARGS, for_cpu

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS = 3
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


@dataclass(frozen=True)
class Configuration:
    """What is trained: the model, the batch, and on which GPUs (two: experts or data over both)."""

    name: str
    gpus: tuple[int, ...]
    layers: int = 4
    micro_batch: int = 8
    sequence: int = 4096
    moe: bool = True
    more: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """Return Megatron's flags."""
        ranks = len(self.gpus)
        wide = ["--expert-model-parallel-size", str(ranks), *FORCED] if self.moe and ranks > 1 else []
        return [
            *MODEL_ARGS, *TRAIN_ARGS, *MOCK, *(MOE_ARGS if self.moe else ()), *PRESET_ARGS, *wide,
            "--num-layers", str(self.layers), "--seq-length", str(self.sequence),
            "--max-position-embeddings", str(self.sequence), "--micro-batch-size", str(self.micro_batch),
            "--global-batch-size", str(2 * ranks * self.micro_batch), "--train-iters", str(STEPS),
            "--log-memory-interval", "1", *self.more,
        ]  # fmt: skip


# Each round fits into two GPUs of 139 GiB at once.
ROUNDS = (
    (
        Configuration("moe", (0,)),
        Configuration("moe, sequence 2,048", (0,), sequence=2048),
        Configuration("moe, selective recompute", (1,), more=tuple(SELECTIVE)),
        Configuration("moe, micro-batch 4", (1,), micro_batch=4),
    ),
    (
        Configuration("moe, full recompute", (0,), more=tuple(FULL)),
        Configuration("dense, micro-batch 4, full recompute", (1,), micro_batch=4, moe=False, more=tuple(FULL)),
        Configuration("moe, 8 layers, micro-batch 4", (1,), layers=8, micro_batch=4),
        Configuration("dense, 8 layers", (0,), layers=8, moe=False),
    ),
    (
        Configuration("moe, EP 2", (0, 1)),
        Configuration("moe, EP 2, dedup", (0, 1), more=tuple(DEDUP)),
        Configuration("dense, DP 2", (0, 1), moe=False),
    ),
)  # fmt: skip


def start(args: argparse.Namespace, configuration: Configuration, number: int) -> gated_run.Started:
    """Start a configuration up to its gate."""
    from megatron_ext.runtime import preset

    cpu = args.device == "cpu"
    flags = configuration.flags()
    if cpu:
        flags = [*for_cpu(flags), *TOY, *(("--moe-ffn-hidden-size", "64") if configuration.moe else ())]
    environment = {
        "PYTHONPATH": gated_run.python_path(ROOT / "build" / "megatron", ROOT),
        "NCCL_NVLS_ENABLE": "0",
        **({"OMP_NUM_THREADS": "1"} if cpu else {}),
        **{variable.name: variable.value for variable in preset.PRESETS["hopper"].variables},
    }
    words = (str(ROOT / "megatron_ext" / "cli.py"), "train", "--device", args.device, "--", *flags)
    job = gated_run.Job(configuration.name, words, environment, configuration.gpus, STEPS)
    return gated_run.start(job, args.work / f"{number:02d}")


def record(configuration: Configuration, log: str) -> dict[str, object]:
    """Return what is kept of a run: its shape, its flags and its memory after the last step."""
    steps = gated_run.parse(log, 1)
    found = {**asdict(configuration), "ranks": len(configuration.gpus), "flags": configuration.flags()}
    del found["gpus"], found["more"]
    allocated = gated_run.values(r"memory \(MB\) \| allocated: ([0-9.]+)", log)
    return {**found, "allocated_mib": allocated[-1], "peak_mib": steps.peak_mib, "reserved_mib": steps.reserved_mib}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="names, with semicolons between")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, default=Path("runs/memory_runs"))
    parser.add_argument("--limit", type=float, default=90, help="give a round up after this many seconds")
    parser.add_argument("--wait-for", type=Path, help="load the first round's imports, then wait for this file")
    args = parser.parse_args()
    args.work = args.work.resolve()
    only = args.only.split(";") if args.only else [one.name for one in sum(ROUNDS, ())]
    rounds = [asked for one in ROUNDS if (asked := [c for c in one if c.name in only])]
    kept: list[dict[str, object]] = []
    failed = 0
    with gated_run.ended_at_exit() as started:
        begun = [[start(args, one, index) for index, one in enumerate(rounds[0])]]
        started += begun[0]
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.1)
        for number, configurations in enumerate(rounds):
            for run in begun[number]:
                run.open_gate()
            if number + 1 < len(rounds):
                begun.append([start(args, one, 10 * (number + 1) + i) for i, one in enumerate(rounds[number + 1])])
                started += begun[-1]
            for configuration, run in zip(configurations, begun[number], strict=True):
                seconds = run.wait(args.limit)
                if seconds is None:
                    failed += 1
                    print(f"{configuration.name}: failed\n{gated_run.failure(run.log, 1500)}", flush=True)
                    continue
                kept.append(record(configuration, run.log))
                found = kept[-1]
                print(f"{configuration.name:<40}{found['peak_mib']:>10.0f} MiB allocated at most"
                      f"{found['reserved_mib']:>10.0f} reserved  {seconds:.0f} s", flush=True)  # fmt: skip
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                whole = {**gated_run.machine(args.device), "steps": STEPS, "configurations": kept}
                args.out.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
