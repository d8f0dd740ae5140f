"""The largest thing to look at, and the knob for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.trace import kinds
from megatron_ext.trace.ranks import Comparison
from megatron_ext.trace.summary import RankSummary

# Less than this share of the span is not worth a knob.
_WORTH = 0.05
_COLLECTIVE_KNOBS = {
    kinds.ALL_TO_ALL: "send each token once: --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend dedup "
    "(docs/dispatch.md), or --overlap-moe-expert-parallel-comm",
    kinds.EXPERT_TRANSPORT: "--overlap-moe-expert-parallel-comm; `megatron-moe bench` compares the dispatchers here",
    kinds.ALL_GATHER: "--overlap-param-gather (with --use-distributed-optimizer)",
    kinds.REDUCE_SCATTER: "--overlap-grad-reduce, larger micro-batches or more of them a step",
    kinds.ALL_REDUCE: "--overlap-grad-reduce; under tensor parallelism --sequence-parallel, or less of it",
    kinds.SEND_RECV: "pipeline stages wait: more micro-batches a step, --num-layers-per-virtual-pipeline-stage",
    kinds.UNKNOWN_PAIRS: "see docs/dispatch.md for all-to-all, pipeline stages for send/recv",
}
_KERNEL_KNOBS = {
    "permute": "--moe-permute-fusion (the preset `--moe-ext-preset hopper` has it), or a dispatcher that sends a token "
    "once",
    "router": "--moe-router-fusion (in the preset)",
    "activation": "SwiGLU takes one pass each way unless MOE_EXT_SWIGLU_KERNELS=torch; --recompute-modules moe_act "
    "runs it twice",
    "norm, rope": "--fused-residual-rmsnorm (in the preset); full recomputation runs them twice",
    "loss": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te (in the preset)",
    "optimizer": "--use-distributed-optimizer over more ranks; more micro-batches a step",
    "monitor": "--moe-ext-observe-interval with a larger number",
    "copy, fill, cast": "--no-create-attention-mask-in-dataloader, gradient accumulation fusion (both in the preset)",
    "elementwise, sums": "the fusions of --moe-ext-preset hopper; each small kernel reads and writes memory once more",
    kinds.OTHER_KERNELS: "--json lists the kernels by name",
    kinds.MEMORY: "copies between host and GPU: see the host's waits",
}


@dataclass(frozen=True)
class Finding:
    """Something that takes time.

    Args:
        what: A sentence.
        share: Of the span.
        knob: What to try.
    """

    what: str
    share: float
    knob: str

    def text(self) -> str:
        """Return the last line of the output."""
        return f"look at first: {self.what} ({self.share:.0%} of the span). Try: {self.knob}"


def first_look(ranks: Sequence[RankSummary], comparison: Comparison | None = None) -> Finding:
    """Return the largest finding over the ranks' mean.

    Args:
        ranks: At least one.
        comparison: Of the ranks; None for one.
    """
    span = sum(rank.span_ns for rank in ranks)
    device = ranks[0].device
    waited = {one.kind: sum(one.waited_ns) for one in comparison.arrivals} if comparison else {}
    found = _findings(ranks, span, waited) if device else _host_findings(ranks, span)
    if device and waited:
        late = sum(waited.values()) / span
        found.append(Finding("ranks wait in collectives for the last one to come", late,
                             "the table of ranks names it; uneven routing: `megatron-moe health RUN_DIR`, "
                             "docs/symptoms.md; else its node: `megatron-moe preflight`"))  # fmt: skip
    worst = max(found, key=lambda finding: finding.share, default=None)
    if worst is None or worst.share < _WORTH:
        products = sum(row.span_ns for rank in ranks for row in rank.rows if row.kind in kinds.PRODUCTS) / span
        return Finding("the products, GEMM and attention; nothing else takes 5 %", products,
                       "larger micro-batches, less recomputation (`megatron-moe plan memory`)")  # fmt: skip
    return worst


def _findings(ranks: Sequence[RankSummary], span: int, waited: Mapping[str, int]) -> list[Finding]:
    found = []
    exposed: dict[str, int] = {}
    for rank in ranks:
        for part in rank.communication.collectives:
            exposed[part.kind] = exposed.get(part.kind, 0) + part.exposed_ns
    for kind, took in exposed.items():
        knob = _COLLECTIVE_KNOBS.get(kind, "see where it is called from in a trace viewer")
        # What a rank waits for a late one is no matter of the transport; it is a finding of its own.
        share = max(0, took - waited.get(kind, 0)) / span
        found.append(Finding(f"{kind} with nothing computed beside it", share, knob))
    for kind, knob in _KERNEL_KNOBS.items():
        took = sum(row.span_ns for rank in ranks for row in rank.rows if row.kind == kind)
        found.append(Finding(f"kernels for {kind}", took / span, knob))
    after_wait = sum(rank.idle_after_wait_ns for rank in ranks)
    idle = sum(rank.idle_ns for rank in ranks) - after_wait
    found.append(Finding("the GPU idles because the host waited for it and then starts with an empty queue",
                         after_wait / span, _wait_knob(ranks)))  # fmt: skip
    found.append(Finding("the GPU idles while the host prepares the next kernels", idle / span,
                         "larger micro-batches, the fusions of --moe-ext-preset hopper, --moe-grouped-gemm, "
                         "--cuda-graph-impl"))  # fmt: skip
    return found


def _wait_knob(ranks: Sequence[RankSummary]) -> str:
    worst = max((wait for rank in ranks for wait in rank.waits), key=lambda wait: wait.total_ns, default=None)
    named = f"{worst.call} in {worst.place}: " if worst else ""
    return f"{named}with --moe-ext-preset hopper the host waits less often (docs/gpu.md)"


def _host_findings(ranks: Sequence[RankSummary], span: int) -> list[Finding]:
    found = []
    for kind in dict.fromkeys(row.kind for rank in ranks for row in rank.rows):
        took = sum(row.span_ns for rank in ranks for row in rank.rows if row.kind == kind)
        if kind in kinds.COMMUNICATION:
            found.append(Finding(f"{kind} over gloo, with nothing computed beside it", took / span,
                                 "larger micro-batches; most of it is waiting for the other rank"))  # fmt: skip
        elif kind in kinds.COMPUTE:
            found.append(Finding(f"operators for {kind}", took / span, "the table of operators names them"))
        else:
            found.append(Finding("Python and autograd around the operators", took / span,
                                 "a model this small is bound by it: a larger --hidden-size or "
                                 "--micro-batch-size shows the operators"))  # fmt: skip
    return found
