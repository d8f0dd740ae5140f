"""Claim: `--moe-ext-preset hopper` trains the handbook's MoE faster than upstream's flags, with the same mathematics.

    python benchmarks/gpu_step.py --data MANIFEST [--upstream TREE] [--plan NAME,NAME,...] [--steps 8] [--out FILE]

Each name of the plan is one fresh process through the plain entry point (`megatron-moe train`), in the order given, so
that baseline and preset alternate on one machine. A process is started, up to its imports, while the one before it
runs, and ended once it has printed its last step. The model is the 8-layer slice of the handbook's (hidden 2,048, 32
heads, 4 KV groups; 64 experts of 1,024, top-8, or a dense FFN of 8,192), sequence 4,096, bf16, one GPU, real text. The
vocabulary is padded to the handbook's 128,256 whatever the tokenizer's is. Figures
are Megatron's own: TFLOP/s a GPU and ms a step, the median after the first three steps; peak allocated MiB.
"""

# ruff: noqa: SIM905  (flags read better as a command line)
from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SKIP = 3  # steps that load kernels
MODEL_ARGS = (
    "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--make-vocab-size-divisible-by 128256"
).split()
MOE_ARGS = (
    "--num-experts 64 --moe-ffn-hidden-size 1024 --moe-router-topk 8 --moe-token-dispatcher-type alltoall "
    "--moe-grouped-gemm --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 "
    "--moe-per-layer-logging"
).split()
TRAIN_ARGS = (
    "--lr 5e-4 --min-lr 5e-5 --lr-decay-style WSD --lr-decay-iters 10000 --lr-wsd-decay-iters 100 --lr-warmup-iters 20 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234 --use-distributed-optimizer "
    "--log-interval 1 --log-throughput --eval-interval 100000 --eval-iters 1 --num-workers 1"
).split()
HANDBOOK_ARGS = (
    "--overlap-grad-reduce --overlap-param-gather --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --cross-entropy-loss-fusion --cross-entropy-fusion-impl native "
    "--no-gradient-accumulation-fusion"  # the handbook's image has Apex for it; this machine does not
).split()
PRESET_ARGS = ["--moe-ext-preset", "hopper"]
# What the preset saves, a larger micro-batch uses: half as many launches, waits and sums of gradients.
LARGER = ["--micro-batch-size", "16"]
FORCED = ["--moe-router-force-load-balancing"]
MONITOR = ["--moe-ext-run-dir", "{run}", "--moe-ext-no-trackio", "--moe-ext-observe-interval", "10"]


@dataclass(frozen=True)
class Variant:
    """A way to run the slice: its flags, its environment, and whether it runs on unpatched Megatron."""

    flags: tuple[str, ...]
    upstream: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def variants(also: list[str]) -> dict[str, Variant]:
    """Return the variants by name.

    Args:
        also: More of them, "NAME=BASE WORD ...": the flags and VARIABLE=VALUE words to put behind those of BASE.
    """
    made = _named()
    for entry in also:
        name, _, rest = entry.partition("=")
        base, *words = rest.split()
        split = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
        variables = tuple((n, v) for n, _, v in (word.partition("=") for word in words[:split]))
        of = made[base]
        made[name] = Variant((*of.flags, *words[split:]), of.upstream, (*of.environment, *variables))
    return made


def _named() -> dict[str, Variant]:
    base = Variant((*MOE_ARGS, *HANDBOOK_ARGS), upstream=True)
    fast = (*MOE_ARGS, *PRESET_ARGS, *LARGER)
    no_cutlass = (("NVTE_USE_CUTLASS_GROUPED_GEMM", "0"),)
    return {
        "upstream": base,
        "upstream-forced": Variant((*base.flags, *FORCED), upstream=True),
        "upstream-dense": Variant(tuple(HANDBOOK_ARGS), upstream=True),
        "preset": Variant(fast),
        "preset-forced": Variant((*fast, *FORCED)),
        "preset-dense": Variant((*PRESET_ARGS, *LARGER)),
        "preset-dense-8": Variant(tuple(PRESET_ARGS)),
        "preset-8": Variant((*MOE_ARGS, *PRESET_ARGS)),
        "preset-fp8": Variant((*fast, "--moe-ext-preset", "hopper-fp8")),
        "preset-monitor": Variant((*fast, *MONITOR)),
        # One setting of the preset taken back, to see what it is worth.
        "preset-no-cutlass": Variant(fast, environment=no_cutlass),
        "preset-loss-check-each": Variant((*fast, "--moe-ext-loss-check", "micro-batch")),
        "preset-no-wgrad-fusion": Variant((*fast, "--no-gradient-accumulation-fusion")),
        "preset-no-nan-check": Variant((*fast, "--no-check-for-nan-in-loss-and-grad")),
        "preset-selective": Variant(
            (*fast, "--recompute-granularity", "selective", "--recompute-modules", "layernorm", "moe_act")
        ),
    }


@dataclass(frozen=True)
class Result:
    """One run: medians after the first steps, the spread over them, and every step's loss."""

    name: str
    tflops: float
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    peak_mib: float
    losses: list[float]
    wall_s: float  # from the gate to the last step: without the imports


def command(args: argparse.Namespace, variant: Variant, folder: Path) -> list[str]:
    """Return the command of a variant, which waits for the file `folder/go`."""
    script = ROOT / "benchmarks" / "upstream_train.py" if variant.upstream else ROOT / "megatron_ext" / "cli.py"
    data = args.data.parent
    return [
        sys.executable, str(ROOT / "benchmarks" / "gated_start.py"), str(folder / "go"), str(script),
        "train", "--device", "cuda", "--", *MODEL_ARGS, *TRAIN_ARGS,
        "--micro-batch-size", str(args.micro_batch), "--global-batch-size", str(args.global_batch),
        "--train-iters", str(args.steps),
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer"),
        "--per-split-data-args-path", str(data / "blend.json"), "--data-cache-path", str(args.work / "cache"),
        *(flag.format(run=folder / "run") for flag in variant.flags),
    ]  # fmt: skip


def environment(args: argparse.Namespace, variant: Variant) -> dict[str, str]:
    """Return the environment: the right Megatron first, one rank, NVLink multicast off."""
    from megatron_ext.runtime import preset

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    tree = args.upstream if variant.upstream else ROOT / "build" / "megatron"
    paths = [str(tree), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NCCL_NVLS_ENABLE": "0", "PYTHONUNBUFFERED": "1"}
    made |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    if variant.upstream:
        made |= {"MPATCH_TREE": str(tree), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    elif name := preset.chosen(variant.flags):
        # The preset sets them too, but here the imports come first.
        made |= {variable.name: variable.value for variable in preset.PRESETS[name].variables}
    return made | dict(variant.environment)


@dataclass
class Started:
    """A process that waits at its gate, or runs."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return (self.folder / "log.txt").read_text(errors="replace")


def start(args: argparse.Namespace, name: str, number: int) -> Started:
    """Start a variant up to its gate."""
    variant = variants(args.also)[name]
    folder = args.work / f"{number:02d}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("wb") as out:
        process = subprocess.Popen(
            command(args, variant, folder), env=environment(args, variant), stdout=out, stderr=subprocess.STDOUT
        )
    return Started(name, folder, process)


def finish(args: argparse.Namespace, run: Started) -> Result | None:
    """Open the gate and wait for the last step; None where the run failed or took too long (its log says why)."""
    begin = time.monotonic()
    (run.folder / "go").touch()
    last = re.compile(rf"iteration +{args.steps}/ +{args.steps} \|.*\n")
    complete = False
    while not complete and run.process.poll() is None and time.monotonic() - begin < args.limit:
        time.sleep(0.1)
        complete = bool(last.search(run.log))
    run.process.kill()
    run.process.wait()
    if not last.search(run.log):
        print(f"{run.name}: failed after {time.monotonic() - begin:.0f} s\n{run.log[-3000:]}", flush=True)
        return None
    return parse(run.name, run.log, time.monotonic() - begin)


def parse(name: str, text: str, wall_s: float) -> Result:
    """Read Megatron's step lines."""

    def values(pattern: str) -> list[float]:
        return [float(value) for value in re.findall(pattern, text)]

    ms = values(r"elapsed time per iteration \(ms\): ([0-9.]+)")[SKIP:]
    tflops = values(r"throughput per GPU \(TFLOP/s/GPU\): ([0-9.]+)")[SKIP:]
    peak = values(r"max allocated: ([0-9.]+)") or values(r"max allocated \(MB\)[^0-9]*([0-9.]+)") or [float("nan")]
    return Result(
        name, statistics.median(tflops), statistics.median(ms), min(ms), max(ms), max(peak),
        values(r"lm loss: ([0-9.E+-]+)"), wall_s,
    )  # fmt: skip


def summary(results: list[Result]) -> dict[str, float]:
    """Return the ratios that the claim is about, over the medians of each variant's runs."""
    runs = {name: [r.tflops for r in results if r.name == name] for name in {r.name for r in results}}
    median = {name: statistics.median(values) for name, values in runs.items()}
    wanted = (("preset", "upstream"), ("preset", "preset-dense"), ("preset-forced", "upstream-forced"),
              ("preset-forced", "preset-dense"), ("preset-dense", "upstream-dense"),
              ("preset-fp8", "preset"), ("preset-monitor", "preset"))  # fmt: skip
    return {f"{a} / {b}": median[a] / median[b] for a, b in wanted if a in median and b in median}


def machine() -> dict[str, str]:
    """Return the card and the versions that a figure belongs to."""
    from importlib.metadata import version

    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "card": card,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_engine": version("transformer_engine"),
    }


def write(args: argparse.Namespace, results: list[Result]) -> None:
    """Write what was measured so far."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = {**machine(), "steps": args.steps, "micro_batch": args.micro_batch}
    record |= {"global_batch": args.global_batch, "ratios": summary(results)}
    args.out.write_text(json.dumps({**record, "runs": [asdict(r) for r in results]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="manifest.json of `megatron-moe tokenize`")
    parser.add_argument("--upstream", type=Path, help="unpatched tree with its dataset helper compiled")
    parser.add_argument("--plan", default="upstream,preset,preset-dense", help=f"of: {', '.join(_named())}")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=BASE [VARIABLE=VALUE ...] [FLAG ...]",
        help="one more variant for the plan: what to put behind those of BASE",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_step"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--until", type=float, default=1e9, help="start no further run after this many seconds")
    parser.add_argument("--wait-for", type=Path, help="load the first run's imports, then wait until this file exists")
    parser.add_argument("--limit", type=float, default=300, help="give a run up after this many seconds")
    args = parser.parse_args()
    args.work = args.work.resolve()
    plan = args.plan.split(",")
    results: list[Result] = []
    waiting = [start(args, plan[0], 0)]
    try:
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.1)
        begin = time.monotonic()
        for number, name in enumerate(plan):
            if time.monotonic() - begin > args.until:
                print(f"{name}: not run, out of time", flush=True)
                break
            current = waiting.pop()
            if number + 1 < len(plan):
                waiting.append(start(args, plan[number + 1], number + 1))
            result = finish(args, current)
            if result is None:
                continue
            results.append(result)
            print(f"{name:<26}{result.tflops:>8.1f} TFLOP/s{result.step_ms:>9.1f} ms ({result.step_ms_min:.0f} to "
                  f"{result.step_ms_max:.0f}){result.peak_mib:>10.0f} MiB  loss {result.losses[-1]:.4f}"
                  f"  {result.wall_s:.0f} s", flush=True)  # fmt: skip
            if args.out:
                write(args, results)
    finally:
        for left in waiting:
            left.process.kill()
            left.process.wait()
    for pair, ratio in summary(results).items():
        print(f"{pair:<34}{ratio:.3f}")
    return 0 if len(results) == len(plan) else 1


if __name__ == "__main__":
    sys.exit(main())
