"""Token dispatchers that send each token once: per destination rank (`dedup`) or per node, then per rank
(`twohop`).

Layers, each testable alone: routing arithmetic (`layout`, `routing`, `counts`, `wire`, `formula`), row
kernels (`rows`, `kernels`), collectives (`transport`), dispatch and combine (`engine`), gradients
(`autograd`), Megatron (`megatron`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_ext.dispatch.options import add_arguments

__all__ = ["add_arguments", "attach", "configure", "step_end"]


def configure(args: argparse.Namespace) -> None:
    """Take the options, before the model is built. See `publish.configure`."""
    from megatron_ext.dispatch import publish

    publish.configure(args)


def attach(model: Sequence[Any], sink: Any) -> None:
    """Number the layers and print what is used, after the model is built. See `publish.attach`."""
    from megatron_ext.dispatch import publish

    publish.attach(model, sink)


def step_end(iteration: int) -> None:
    """Give the counters to the writer on a logging step. See `publish.step_end`."""
    from megatron_ext.dispatch import publish

    publish.step_end(iteration)
