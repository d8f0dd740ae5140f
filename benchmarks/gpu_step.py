"""Claim: `--moe-ext-preset hopper` trains the handbook's MoE faster than upstream's flags, with the same mathematics.

    python benchmarks/gpu_step.py --data MANIFEST [--upstream TREE] [--plan NAME,NAME,...] [--steps 8] [--out FILE]
    python benchmarks/gpu_step.py --ranks 2 --layers 16 --global-batch 48 --plan upstream,preset@6,preset-dedup@6 ...

Each name of the plan is one fresh start through the plain entry point (`megatron-moe train`), in the order given, so
that baseline and preset alternate on one machine; `NAME@N` takes micro-batch N. A start is made, up to its imports,
while the one before it runs, and ended once it has printed its last step. The model is the handbook's (hidden 2,048, 32
heads, 4 KV groups; 64 experts of 1,024, top-8, or a dense FFN of 8,192) with 8 of its 16 layers unless told otherwise,
sequence 4,096, bf16, real text, or Megatron's mock data without --data. The experts lie over all ranks, but for
`preset-unspread`. The vocabulary is padded to the handbook's 128,256 whatever the tokenizer's is. Figures are
Megatron's own: TFLOP/s a GPU and ms a step, the median after the first three steps; peak allocated MiB of rank 0.
Ratios take a variant's fastest micro-batch. `--device cpu` rehearses with a toy.
"""

# ruff: noqa: SIM905  (flags read better as a command line)
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gated_run

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
TORCH_EXPERTS = ["--moe-ext-experts", "torch"]
LOCAL_ARGS = (
    "--transformer-impl local --no-rope-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
).split()
FORCED = ["--moe-router-force-load-balancing"]
DEDUP = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "dedup"]
# Attention and router launched as one graph each way: the host has that much less to do between two dispatches.
GRAPHS = ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "2", "--cuda-graph-modules"]
# The experts' weight gradients while their input gradients travel home.
WGRAD = ["--overlap-dispatch-backward-with-experts-wgrad"]
# One micro-batch's exchange under another's compute.
OVERLAP = ["--overlap-moe-expert-parallel-comm"]
# All experts on every GPU: no exchange; their gradients are reduced behind the backward pass instead.
UNSPREAD = ["--expert-model-parallel-size", "1", "--overlap-grad-reduce", "--overlap-param-gather"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", "moe_act"]
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000"]
# Put behind the flags above, of which Megatron takes the last: what the CPU trains in a few seconds.
TOY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 64 --max-position-embeddings 64 --make-vocab-size-divisible-by 128 --no-gradient-accumulation-fusion"
).split()
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
        also: More of them, "NAME=BASE WORD ...": VARIABLE=VALUE words, then flags, to put behind those of BASE.
    """
    made = _named()
    for line in also:
        name, _, rest = line.partition("=")
        base, *words = rest.split()
        split = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
        variables = tuple((n, v) for n, _, v in (word.partition("=") for word in words[:split]))
        of = made[base]
        made[name] = Variant((*of.flags, *words[split:]), of.upstream, (*of.environment, *variables))
    return made


def _named() -> dict[str, Variant]:
    base = Variant((*MOE_ARGS, *HANDBOOK_ARGS), upstream=True)
    fast = (*MOE_ARGS, *PRESET_ARGS)
    # Learned routing changes the sizes at every step: the allocator then leaves gaps that other sizes cannot use.
    expandable = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    no_cutlass = (("NVTE_USE_CUTLASS_GROUPED_GEMM", "0"),)
    return {
        "upstream": base,
        "upstream-forced": Variant((*base.flags, *FORCED), upstream=True),
        "upstream-dense": Variant(tuple(HANDBOOK_ARGS), upstream=True),
        "preset": Variant(fast),
        "preset-forced": Variant((*fast, *FORCED)),
        "preset-dense": Variant(tuple(PRESET_ARGS)),
        "preset-fp8": Variant((*fast, "--moe-ext-preset", "hopper-fp8")),
        "preset-monitor": Variant((*fast, *MONITOR)),
        "preset-dedup": Variant((*fast, *DEDUP)),
        "preset-dedup-forced": Variant((*fast, *DEDUP, *FORCED)),
        "preset-dedup-graphs": Variant((*fast, *DEDUP, *GRAPHS, "attn", "moe_router")),
        "preset-overlap": Variant((*fast, *OVERLAP)),
        "preset-dedup-overlap": Variant((*fast, *DEDUP, *OVERLAP)),
        # One setting of the preset taken back, to see what it is worth.
        "preset-no-cutlass": Variant(fast, environment=no_cutlass),
        "preset-loss-check-each": Variant((*fast, "--moe-ext-loss-check", "micro-batch")),
        "preset-no-wgrad-fusion": Variant((*fast, "--no-gradient-accumulation-fusion")),
        # Experts over torch's grouped product, everything else Transformer Engine's.
        "preset-torch-experts": Variant((*fast, *TORCH_EXPERTS)),
        "preset-torch-experts-forced": Variant((*fast, *TORCH_EXPERTS, *FORCED)),
        # A machine without Transformer Engine: grouped experts, and Megatron's one after the other.
        "local": Variant((*MOE_ARGS, *LOCAL_ARGS)),
        "local-sequential": Variant((*MOE_ARGS, *LOCAL_ARGS, "--moe-ext-experts", "megatron")),
        "preset-no-nan-check": Variant((*fast, "--no-check-for-nan-in-loss-and-grad")),
        "preset-selective": Variant((*fast, *SELECTIVE)),
        "preset-expandable": Variant(fast, environment=expandable),
        "preset-dedup-selective": Variant((*fast, *DEDUP, *SELECTIVE)),
        "preset-dedup-wgrad": Variant((*fast, *DEDUP, *WGRAD)),
        "preset-dedup-expandable": Variant((*fast, *DEDUP), environment=expandable),
        "preset-unspread": Variant((*fast, *UNSPREAD), environment=expandable),
        "preset-dedup-forced-expandable": Variant((*fast, *DEDUP, *FORCED), environment=expandable),
    }


@dataclass(frozen=True)
class Result(gated_run.Steps):
    """One run: Megatron's figures, of which entry of the plan, and how long it took."""

    name: str
    micro_batch: int
    wall_s: float  # from the gate to the last step: without the imports


def entry(args: argparse.Namespace, word: str) -> tuple[str, int]:
    """Return the variant's name and the micro-batch of an entry of the plan."""
    name, _, micro_batch = word.partition("@")
    return name, int(micro_batch or args.micro_batch)


def words(args: argparse.Namespace, word: str, folder: Path) -> tuple[str, ...]:
    """Return the script and the flags of an entry of the plan."""
    name, micro_batch = entry(args, word)
    variant = variants(args.also)[name]
    script = ROOT / "benchmarks" / "upstream_train.py" if variant.upstream else ROOT / "megatron_ext" / "cli.py"
    moe = "--num-experts" in variant.flags
    cpu = args.device == "cpu"
    flags = [flag.format(run=folder / "run") for flag in variant.flags]
    return (
        str(script), "train", "--device", args.device, "--", *MODEL_ARGS, "--num-layers", str(args.layers), *TRAIN_ARGS,
        "--micro-batch-size", str(micro_batch), "--global-batch-size", str(args.global_batch),
        # Reading the memory's statistics takes time, so it is done once, when the last step's time has been taken.
        "--train-iters", str(args.steps), "--log-memory-interval", str(args.steps), *data(args),
        *(("--expert-model-parallel-size", str(args.ranks)) if moe and args.ranks > 1 else ()),
        *(for_cpu(flags) if cpu else flags),
        *(TOY if cpu else ()), *(("--moe-ffn-hidden-size", "64") if cpu and moe else ()),
    )  # fmt: skip


def for_cpu(flags: list[str]) -> list[str]:
    """Return flags without those that need a GPU."""
    preset, *name = PRESET_ARGS
    return [flag for flag in flags if flag not in (preset, *name, "--moe-grouped-gemm", "moe_act")]


def data(args: argparse.Namespace) -> list[str]:
    """Return the flags of the text, or of Megatron's mock data."""
    if args.data is None:
        return MOCK
    folder = args.data.parent
    return [
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer"),
        "--per-split-data-args-path", str(folder / "blend.json"), "--data-cache-path", str(args.work / "cache"),
    ]  # fmt: skip


def environment(args: argparse.Namespace, variant: Variant) -> dict[str, str]:
    """Return what is added to the environment: the right Megatron first, NVLink multicast off."""
    from megatron_ext.runtime import preset

    tree = args.upstream if variant.upstream else ROOT / "build" / "megatron"
    made = {"PYTHONPATH": gated_run.python_path(tree, ROOT), "NCCL_NVLS_ENABLE": "0"}
    if variant.upstream:
        made |= {"MPATCH_TREE": str(tree), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    elif name := preset.chosen(variant.flags):
        # The preset sets them too, but here the imports come first.
        made |= {variable.name: variable.value for variable in preset.PRESETS[name].variables}
    if args.device == "cpu":
        made |= {"OMP_NUM_THREADS": "1"}
    return made | dict(variant.environment)


def start(args: argparse.Namespace, word: str, number: int) -> gated_run.Started:
    """Start an entry of the plan up to its gate."""
    folder = args.work / f"{number:02d}-{word}"
    variant = variants(args.also)[entry(args, word)[0]]
    made = environment(args, variant)
    job = gated_run.Job(word, words(args, word, folder), made, tuple(range(args.ranks)), args.steps)
    return gated_run.start(job, folder)


def finish(args: argparse.Namespace, run: gated_run.Started) -> Result | None:
    """Open the gate and wait for the last step; None where the run failed or took too long (its log says why)."""
    run.open_gate()
    seconds = run.wait(args.limit)
    if seconds is None:
        print(f"{run.job.name}: failed after {time.monotonic() - run.opened:.0f} s", flush=True)
        print(gated_run.failure(run.log), flush=True)
        return None
    name, micro_batch = entry(args, run.job.name)
    return Result(**asdict(gated_run.parse(run.log, SKIP)), name=name, micro_batch=micro_batch, wall_s=seconds)


def summary(results: list[Result]) -> dict[str, float]:
    """Return the ratios that the claim is about, over the medians of each variant's runs at its fastest micro-batch."""
    median: dict[str, float] = {}
    for name, micro_batch in sorted({(r.name, r.micro_batch) for r in results}):
        runs = [r.tflops for r in results if (r.name, r.micro_batch) == (name, micro_batch)]
        median[name] = max(median.get(name, 0.0), statistics.median(runs))
    wanted = (("preset", "upstream"), ("preset", "preset-dense"), ("preset-forced", "upstream-forced"),
              ("preset-forced", "preset-dense"), ("preset-dense", "upstream-dense"),
              ("preset-monitor", "preset"), ("preset-fp8", "preset"), ("preset-dedup", "preset"),
              ("preset-dedup-forced", "preset-forced"), ("preset-dedup", "preset-dense"),
              ("preset-dedup", "upstream"), ("preset-dedup-overlap", "preset-dedup"),
              ("preset-dedup-forced", "upstream-forced"), ("preset-dedup-expandable", "preset-dense"),
              ("preset-dedup-expandable", "upstream"), ("preset-unspread", "preset-dense"),
              ("preset-unspread", "preset-dedup-expandable"),
              ("preset-dedup-forced-expandable", "upstream-forced"))  # fmt: skip
    return {f"{a} / {b}": median[a] / median[b] for a, b in wanted if a in median and median.get(b)}


def write(args: argparse.Namespace, results: list[Result]) -> None:
    """Write what was measured so far."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = {**gated_run.machine(args.device), "ranks": args.ranks, "layers": args.layers, "steps": args.steps}
    record |= {"global_batch": args.global_batch, "data": "text" if args.data else "mock", "ratios": summary(results)}
    args.out.write_text(json.dumps({**record, "runs": [asdict(r) for r in results]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="manifest.json of `megatron-moe tokenize` (default: mock data)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs; the experts lie over all of them")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with a toy")
    parser.add_argument("--upstream", type=Path, help="unpatched tree with its dataset helper compiled")
    names = f"of: {', '.join(_named())}; NAME@N takes micro-batch N"
    parser.add_argument("--plan", default="upstream,preset,preset-dense", help=names)
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
    if args.upstream is None and any(variants(args.also)[entry(args, word)[0]].upstream for word in plan):
        parser.error("the plan has runs on unpatched Megatron: give its tree with --upstream")
    results: list[Result] = []
    with gated_run.ended_at_exit() as runs:
        runs.append(start(args, plan[0], 0))
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.1)
        begin = time.monotonic()
        for number, name in enumerate(plan):
            if time.monotonic() - begin > args.until:
                print(f"{name}: not run, out of time", flush=True)
                break
            if number + 1 < len(plan):
                runs.append(start(args, plan[number + 1], number + 1))
            result = finish(args, runs[number])
            if result is None:
                continue
            results.append(result)
            print(f"{name:<26}{result.tflops:>8.1f} TFLOP/s{result.step_ms:>9.1f} ms ({result.step_ms_min:.0f} to "
                  f"{result.step_ms_max:.0f}){result.peak_mib:>10.0f} MiB, {result.reserved_mib:.0f} reserved  loss "
                  f"{result.losses[-1]:.4f}  {result.wall_s:.0f} s", flush=True)  # fmt: skip
            if args.out:
                write(args, results)
    for pair, ratio in summary(results).items():
        print(f"{pair:<34}{ratio:.3f}")
    return 0 if len(results) == len(plan) else 1


if __name__ == "__main__":
    sys.exit(main())
