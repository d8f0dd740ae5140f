"""When does a run from scratch catch up with an upcycled one? The two published cases, scaled to a run of one's own.

OLMoE (arXiv 2409.02060): an MoE of 1B active weights, from a dense model of 1B after 2T tokens; a run from scratch
caught up after 500B tokens, 25 % of the dense run's tokens.
Sparse upcycling (arXiv 2212.05055): it took 120 % of the dense checkpoint's compute.

Compute is 6 * active weights * tokens, forward and backward; attention scores are left out. Two cases are no law, and
they span a factor of five: the answer is a range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import UserError

OLMOE_TOKENS = 0.25
SPARSE_UPCYCLING_COMPUTE = 1.2
Verdict = Literal["upcycle", "open", "scratch"]
WORDS: dict[str, str] = {
    "upcycle": "upcycle: the run ends before a run from scratch catches up in either case",
    "open": "open: a run from scratch catches up within the run in one case and not in the other",
    "scratch": "from scratch: it catches up within the run in both cases",
}


@dataclass(frozen=True)
class Cost:
    """The range of the catch-up, and what it means for a run.

    Attributes:
        olmoe_tokens: Catch-up as in OLMoE, in tokens of the MoE run.
        sparse_tokens: Catch-up as in sparse upcycling, in tokens of the MoE run.
        dense_flops: Compute of the dense run.
        moe_flops: Compute of the MoE run.
        verdict: `upcycle`, `open` or `scratch`, where the dense model is there already.
        scratch_tokens: What a run from scratch could train on with the compute of both runs.
    """

    olmoe_tokens: float
    sparse_tokens: float
    dense_flops: float
    moe_flops: float
    verdict: Verdict
    scratch_tokens: float

    @property
    def pays_with_dense(self) -> Verdict:
        """The verdict where the dense run would have to be trained first, for this alone."""
        return _verdict(self.scratch_tokens, self.olmoe_tokens, self.sparse_tokens)


def cost(*, dense_tokens: float, moe_tokens: float, dense_active: float, moe_active: float) -> Cost:
    """Return when a run from scratch catches up.

    Args:
        dense_tokens: Tokens that the dense model was trained on.
        moe_tokens: Tokens that the MoE shall be trained on.
        dense_active: Weights of the dense model.
        moe_active: Weights that a token meets in the MoE.

    Raises:
        UserError: A number is not positive.
    """
    if min(dense_tokens, moe_tokens, dense_active, moe_active) <= 0:
        raise UserError("tokens and weights must be positive", where=f"{dense_tokens:g} and {moe_tokens:g} tokens",
                        remedy="pass --dense-tokens 500B --tokens 50B", exit_code=64)
    olmoe = OLMOE_TOKENS * dense_tokens
    sparse = SPARSE_UPCYCLING_COMPUTE * dense_tokens * dense_active / moe_active
    return Cost(
        olmoe_tokens=olmoe,
        sparse_tokens=sparse,
        dense_flops=6 * dense_active * dense_tokens,
        moe_flops=6 * moe_active * moe_tokens,
        verdict=_verdict(moe_tokens, olmoe, sparse),
        scratch_tokens=moe_tokens + dense_tokens * dense_active / moe_active,
    )


def _verdict(tokens: float, *catch_ups: float) -> Verdict:
    if tokens < min(catch_ups):
        return "upcycle"
    return "scratch" if tokens >= max(catch_ups) else "open"
