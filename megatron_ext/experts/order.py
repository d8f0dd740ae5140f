"""Whether a checkpoint's optimizer state can be read by this run's experts.

Megatron's distributed optimizer saves its state by default as the buffers lie (`dp_reshardable`): fp32 weights and
Adam's moments, without names. A run whose experts are registered in another order reads them into the wrong experts,
and nothing notices: the buffers have the same sizes. So the order is compared before anything is built.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.upcycle.source import TRACKER, open_source

# In which order the experts of a layer lie in the buffers.
NAMES = {
    "torch": "torch's grouped experts",
    "te": "Transformer Engine's grouped experts",
    "local": "Megatron's experts, one after the other",
}


def saved_order(args: Namespace) -> str:
    """Return whose order the optimizer state to be loaded is in (a key of `NAMES`); empty where that is no matter.

    Args:
        args: Megatron's validated arguments.
    """
    given = vars(args)  # an entry script of another kind may lack some
    folder = _folder(given)
    # A rank's only expert is in any order.
    alone = given.get("num_experts") == given.get("expert_model_parallel_size")
    if folder is None or alone or not given.get("use_distributed_optimizer"):
        return ""
    try:
        source = open_source(folder)
    except UserError:
        return ""  # another format, or damaged: Megatron says so when it loads it
    if not any(".gbuf_idx_" in name for name in source.tensors):
        return ""
    return order_of(source.args, getattr(source.args, "moe_ext_experts", None) or "megatron")


def order_of(args: Namespace, experts: str) -> str:
    """Return the order of a run's experts (a key of `NAMES`), empty for a dense model.

    Args:
        args: The run's arguments.
        experts: `torch` or `megatron`.
    """
    if not args.num_experts:
        return ""
    if experts == "torch":
        return "torch"
    return "te" if args.moe_grouped_gemm and args.transformer_impl == "transformer_engine" else "local"


def _folder(given: Mapping[str, Any]) -> Path | None:
    """Return the folder whose optimizer state is to be loaded, if any."""
    # An upcycling start reads a dense checkpoint's weights only; a requeued one goes on from its own.
    folder = given.get("save" if given.get("moe_use_upcycling") else "load")
    if given.get("no_load_optim") or given.get("finetune") or folder is None:
        return None
    return Path(folder) if (Path(folder) / TRACKER).is_file() else None
