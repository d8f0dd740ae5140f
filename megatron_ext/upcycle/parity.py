"""Compare an MoE of one expert with the dense run beside it: both must train alike.

    python -m megatron_ext.upcycle.parity RUN_DIR/dense RUN_DIR/moe

One expert with top-1 computes the dense model's function (its router weight is 1), so the losses stay together. The
load-balancing loss E * sum(f_i * P_i) of one expert is 1 * 1 * 1, and the router's gradient is zero: the softmax over
one logit is constant. Megatron counts the zeros of all gradients (--log-num-zeros-in-grad), so the MoE must have as
many more of them as its routers have weights. Reference: the training handbook, section 2.5 (0.00087 over 15 steps).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.tracking.rundir import Run, read_run
from megatron_ext.upcycle.flags import moe_layers, parse_layer_freq

LOSS, BALANCE, ZEROS = "lm loss", "load_balancing_loss", "num-zeros"
# Of the router weights: so far the count may be off, because a few other gradients are zero by chance (bf16: some 20).
CHANCE = 1e-3


@dataclass(frozen=True)
class Parity:
    """What the comparison found.

    Attributes:
        steps: Steps that both runs logged.
        largest_gap: Of the two language-model losses at one step.
        gap_at: That step.
        limit: The largest gap that passes.
        balance_off: Largest distance of the load-balancing loss from 1.
        router_weights: Weights of all routers together.
        extra_zeros: Zeros in the MoE's gradient beyond the dense run's, the fewest over the steps.
    """

    steps: int
    largest_gap: float
    gap_at: int
    limit: float
    balance_off: float
    router_weights: int
    extra_zeros: int

    @property
    def faults(self) -> list[str]:
        """What does not hold, in words; empty where all holds."""
        found = []
        if not self.largest_gap < self.limit:
            found.append(f"the losses differ by {self.largest_gap:.3g} at step {self.gap_at}, limit {self.limit:g}")
        if self.balance_off != 0:
            found.append(f"the load-balancing loss is {self.balance_off:.3g} away from 1")
        if self.extra_zeros < self.router_weights * (1 - CHANCE):
            found.append(f"the routers have {self.router_weights} weights, and the gradient only {self.extra_zeros} "
                         "more zeros than the dense one: router gradients are not zero")
        return found


def compare(dense: Run, moe: Run, *, steps: int, limit: float) -> Parity:
    """Compare two runs over the steps that both logged.

    Raises:
        UserError: There are fewer than `steps` of them, the MoE has more than one expert, or a scalar is missing.
    """
    if moe.info.config.get("num_experts") != 1:
        raise UserError("the second run is not an MoE of one expert", where=str(moe.path),
                        remedy="give the dense run first, then the MoE: see examples/moe/one_expert_parity.sbatch")
    losses = [_series(run, LOSS) for run in (dense, moe)]
    shared = sorted(losses[0].keys() & losses[1].keys())
    if len(shared) < steps:
        raise UserError("the runs have too few steps in common", where=f"{len(shared)} of {steps} steps",
                        remedy="train both for as many steps with --log-interval 1, or pass --steps")
    gaps = [abs(losses[0][step] - losses[1][step]) for step in shared]
    # A loss that is nan or infinite is no parity.
    worst = int(np.argmax([gap if np.isfinite(gap) else np.inf for gap in gaps]))
    balance, zeros = _series(moe, BALANCE), [_series(run, ZEROS) for run in (dense, moe)]
    config = moe.info.config
    layers = moe_layers(parse_layer_freq(config.get("moe_layer_freq", 1)), int(config["num_layers"]))
    return Parity(
        steps=len(shared),
        largest_gap=float(gaps[worst]),
        gap_at=shared[worst],
        limit=limit,
        balance_off=max(abs(balance[step] - 1) for step in shared),
        router_weights=sum(layers) * int(config["hidden_size"]),
        extra_zeros=int(min(zeros[1][step] - zeros[0][step] for step in shared)),
    )


def _series(run: Run, key: str) -> dict[int, float]:
    steps, values = run.series(key)
    if not len(steps):
        raise UserError("a scalar is missing from the run", where=f"{key} in {run.path}",
                        remedy="train with --log-interval 1 --log-num-zeros-in-grad and an aux loss")
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; return 0 where all holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ext.upcycle.parity", description=__doc__.split("\n")[0])
    parser.add_argument("dense", type=Path, help="run directory of the dense run")
    parser.add_argument("moe", type=Path, help="run directory of the MoE of one expert")
    parser.add_argument("--steps", type=int, default=15, help="steps that both must have (default 15)")
    parser.add_argument("--limit", type=float, default=1e-3, help="largest gap of the losses (default 1e-3)")
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    args = parser.parse_args(argv)
    try:
        found = compare(read_run(args.dense, routing=False), read_run(args.moe, routing=False), steps=args.steps,
                        limit=args.limit)
    except UserError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code
    report: dict[str, Any] = {**asdict(found), "faults": found.faults}
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{found.steps} steps: largest gap of the losses {found.largest_gap:.2g} (step {found.gap_at}), "
              f"load-balancing loss {'exactly 1' if not found.balance_off else f'off by {found.balance_off:.2g}'}, "
              f"{found.extra_zeros} more zeros in the gradient for {found.router_weights} router weights")
        for fault in found.faults:
            print(f"not alike: {fault}")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
