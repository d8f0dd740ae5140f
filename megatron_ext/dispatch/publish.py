"""What the dispatchers share in a process: options, counters, and the way of the counters to the run's writer.

`configure` before the model is built (our entry point does it), `attach` after, `step_end` after every step. Without
`configure`, as under stock entry scripts, the environment answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_ext.dispatch import options as options_module
from megatron_ext.dispatch import report
from megatron_ext.dispatch.counters import Counters, LayerCounter
from megatron_ext.dispatch.options import DispatchOptions

METRICS = ("rows_off_rank", "rows_off_node", "rows_off_node_needed", "choices_off_node")


class Scalars(Protocol):
    """The part of the run's writer that is needed (docs/architecture.md)."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""


@dataclass
class Session:
    """The state of this process.

    Args:
        options: As configured.
        max_tokens: Most tokens of a rank in a micro-batch, None where it varies or is not known.
        interval: Steps between two readings of the counters.
        counters: Sums since the last reading.
        sink: The run's writer, on the writing rank only.
    """

    options: DispatchOptions
    max_tokens: int | None = None
    interval: int = 1
    counters: Counters = field(default_factory=Counters)
    sink: Scalars | None = None


_session: Session | None = None


def session() -> Session:
    """The state of this process."""
    global _session
    if _session is None:
        _session = Session(options_module.from_args(argparse.Namespace()))
    return _session


def configure(args: argparse.Namespace) -> None:
    """Take Megatron's validated arguments."""
    global _session
    given = options_module.from_args(args)
    interval = max(1, getattr(args, "log_interval", None) or 1)
    _session = Session(given, given.max_tokens or tokens_of(args), interval)


def tokens_of(args: argparse.Namespace) -> int | None:
    """Tokens that each rank brings to a MoE layer, None where micro-batches vary."""
    varies = ("variable_seq_lengths", "dataloader_inter_document_masking", "sft", "hybrid_context_parallel")
    if any(getattr(args, name, False) for name in varies):
        return None
    split = (args.tensor_model_parallel_size or 1) * (getattr(args, "context_parallel_size", 1) or 1)
    micro_batch = max(args.micro_batch_size or 0, getattr(args, "eval_micro_batch_size", None) or 0)
    return -(-args.seq_length * micro_batch // split) or None


def attach(model: Sequence[Any], sink: Scalars | None) -> None:
    """Number the managers by layer (from 0, whole model), and print what is used."""
    for chunk in model:
        for module in chunk.modules():
            manager = getattr(getattr(module, "token_dispatcher", None), "_comm_manager", None)
            if manager is not None and hasattr(manager, "layer_number"):
                manager.layer_number = int(module.layer_number) - 1
    session().sink = sink
    report.show()


def step_end(iteration: int) -> None:
    """On a logging step give the counters to the writer."""
    state = session()
    if not state.counters.layers or iteration % state.interval:
        return
    taken = state.counters.take()
    if state.sink is not None:
        state.sink.scalars(iteration, keyed(taken))


def keyed(layers: Mapping[int, LayerCounter]) -> dict[str, float]:
    """The counters under the names of `observe.names`: one value a layer, and the largest."""
    from megatron_ext.observe import names

    values: dict[str, float] = {}
    for metric in METRICS:
        per_layer = {layer: float(counter.values()[metric]) for layer, counter in layers.items()}
        values |= {names.layer_key(metric, layer): value for layer, value in per_layer.items() if layer >= 0}
        values[names.aggregate_key(metric, "max")] = max(per_layer.values())
    values[names.step_key("dispatch_gib_off_node")] = sum(c.bytes_off_node for c in layers.values()) / 2**30
    return values
