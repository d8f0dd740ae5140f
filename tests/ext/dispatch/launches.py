"""How many launches the forward of a dispatch takes, from the routing map to the experts' rows. Run as a script:

    TRITON_INTERPRET=1 MOE_EXT_DISPATCH_KERNELS=interpret python launches.py

Two gloo ranks, Triton's kernels interpreted. Counted are torch operators that write (no views, no bare allocations),
collectives and calls of a Triton kernel; a GPU adds the copy of the counts to the host. Prints one line a form; of the
static one also that of a layer's first micro-batch, in which no rows are laid out ahead of their counts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from gloo_world import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from megatron_ext.dispatch.autograd import Room, choose, dispatch, to_experts
from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.transport import Groups

TOKENS, EXPERTS, TOP_K, HIDDEN = 12, 8, 3, 16
# Allocations and other names of the same memory: nothing runs on the device.
FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten._reshape_alias", "aten.lift_fresh")


class Launches(TorchDispatchMode):
    """Counts launches by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not (self._inside or func.is_view or name.startswith(FREE)):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Launches:
        self._run = interpreter.GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen[f"triton {executor.fn.__name__}"] += 1
            self._inside = True
            try:
                return self._run(executor, *args, **kwargs)
            finally:
                self._inside = False

        interpreter.GridExecutor.__call__ = counted
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        interpreter.GridExecutor.__call__ = self._run


def count(rank: int, world: int, static: bool, guess: int) -> dict[str, int]:
    """One forward on this rank, by name; `guess`: the experts' rows in the micro-batch before, 0 for the first."""
    made = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, EXPERTS, generator=made)
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    x = torch.randn(TOKENS, HIDDEN, generator=made, dtype=torch.float32).requires_grad_()
    probs = (scores * routing_map).requires_grad_()
    engine = Engine(Layout(world, rank, EXPERTS // world, world), Groups(dist.group.WORLD), static, TOKENS)
    with Launches() as launches:
        ids, weights = choose(routing_map, probs, TOP_K)
        rows, row_weights, handle = dispatch(engine, x, ids, weights)
        to_experts(rows, row_weights, handle, counts_on_device=True, room=Room(guess))
    return dict(launches.seen)


def main() -> None:
    for form, static, guess in (("first", True, 0), ("static", True, TOKENS * TOP_K), ("alltoallv", False, 0)):
        seen = run_ranks(count, 2, static, guess)[0]
        parts = ", ".join(f"{name} {number}" for name, number in seen.items())
        print(f"{form}: {sum(seen.values())} launches: {parts}")


if __name__ == "__main__":
    main()
