"""Times dispatch and combine, forward and backward, of every dispatcher that runs here. Called on every rank.

All dispatchers work on the same tokens and routing in one process, in turn, so that a busy machine slows all alike. The
experts are left out: an expert's row is multiplied by its weight and goes home.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.dispatch.autograd import combine, dispatch, from_experts, to_experts
from megatron_ext.dispatch.baseline import row_per_choice_combine, row_per_choice_dispatch
from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.transport import make_groups

PHASES = ("dispatch", "combine", "combine backward", "dispatch backward")
Send = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]


@dataclass(frozen=True)
class Shape:
    """What is sent.

    Args:
        tokens: On each rank.
        hidden: H.
        num_experts: E over all ranks.
        top_k: k.
        dtype: Of the hidden values.
        skewed: Three quarters of the tokens prefer the first eighth of the experts, instead of a uniform choice.
    """

    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    skewed: bool


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats of the slowest rank, in ms, one a phase, and the largest of (p90 - p10) / median.

    Args:
        name: The dispatcher.
        shape: What was sent, plain values.
        ms: One figure a phase of `PHASES`.
        total_ms: Their sum.
        spread: Relative spread of the whole.
        largest_gap: Largest difference of the output from the first dispatcher's.
    """

    name: str
    shape: dict[str, Any]
    ms: dict[str, float]
    total_ms: float
    spread: float
    largest_gap: float


def dispatchers(layout: Layout, group: Any, names: Sequence[str]) -> dict[str, Send]:
    """Build the dispatchers asked for; process groups are made here, on all ranks alike."""

    def ours(two_hops: bool, static: bool | None) -> Send:
        engine = Engine(layout, make_groups(layout, group, two_hops=two_hops), static=static)

        def send(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
            rows, row_weights, handle = dispatch(engine, x, ids, weights)
            out, flat, order, _ = to_experts(rows, row_weights, handle)
            return out, flat, lambda done: combine(engine, from_experts(done, order), handle)

        return send

    def alltoall(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        out, flat, _, way = row_per_choice_dispatch(layout, group, x, ids, weights)
        return out, flat, lambda done: row_per_choice_combine(done, way)

    def megatron() -> Send:
        from megatron_ext.dispatch.bench_megatron import upstream_alltoall

        return upstream_alltoall(layout, group)

    makers: dict[str, Callable[[], Send]] = {
        "alltoall": lambda: alltoall,
        "megatron": megatron,
        "dedup": lambda: ours(False, False),
        "dedup-static": lambda: ours(False, True),
        "twohop": lambda: ours(True, False),
        "twohop-static": lambda: ours(True, True),
    }
    return {name: makers[name]() for name in names}


def make_tokens(shape: Shape, rank: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random tokens, ascending choices, weights that add up to 1, and a gradient for the output."""
    made = torch.Generator().manual_seed(1 + rank)
    scores = torch.rand(shape.tokens, shape.num_experts, generator=made)
    if shape.skewed:
        favoured = torch.rand(shape.tokens, 1, generator=made) < 0.75
        scores[:, : max(1, shape.num_experts // 8)] += 0.5 * favoured
    ids = scores.topk(shape.top_k, dim=1).indices.sort(dim=1).values
    weights = torch.rand(shape.tokens, shape.top_k, generator=made)
    weights /= weights.sum(1, keepdim=True)
    x, grad = (torch.randn(shape.tokens, shape.hidden, generator=made).to(shape.dtype) for _ in range(2))
    return x.to(device), ids.to(device), weights.to(device), grad.to(device)


def time_all(
    sends: dict[str, Send], shape: Shape, group: Any, *, device: torch.device, repeats: int, warmup: int = 3
) -> list[Timing]:
    """Time every dispatcher on one shape, turn by turn. Returns the same list on every rank."""
    rank = dist.get_rank(group)
    data = make_tokens(shape, rank, device)
    samples: dict[str, list[list[float]]] = {name: [] for name in sends}
    outputs: dict[str, Tensor] = {}
    for turn in range(warmup + repeats):
        for name, send in sends.items():
            times, outputs[name] = _once(send, data, group, device)
            if turn >= warmup:
                samples[name].append(times)
    first = outputs[next(iter(sends))].float()
    return [
        _summary(name, shape, samples[name], (outputs[name].float() - first).abs().max().item(), group, device)
        for name in sends
    ]


def _once(
    send: Send, data: tuple[Tensor, Tensor, Tensor, Tensor], group: Any, device: torch.device
) -> tuple[list[float], Tensor]:
    x, ids, weights, grad = data
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    clock = Clock(group, device)
    clock.start()
    rows, flat, home = send(x, ids, weights)
    clock.lap()
    done = rows * flat.unsqueeze(1).to(rows.dtype)
    done_leaf = done.detach().requires_grad_()
    clock.start()
    out = home(done_leaf)
    clock.lap()
    clock.start()
    (grad_done,) = torch.autograd.grad(out, done_leaf, grad)
    clock.lap()
    grads = torch.autograd.grad(done, (rows, flat), grad_done)
    clock.start()
    torch.autograd.grad((rows, flat), (x, weights), grads)
    clock.lap()
    return clock.read(), out.detach()


class Clock:
    """Laps on the GPU's own clock, or the host's without one; all ranks start a lap together."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._cuda = group, device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin a lap, once all ranks are here."""
        dist.barrier(self._group)
        self._mark()

    def lap(self) -> None:
        """End it."""
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> list[float]:
        """Return the ms of every lap."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if self._cuda:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [(end - begin) * 1e3 for begin, end in pairs]


def _summary(
    name: str, shape: Shape, samples: list[list[float]], gap: float, group: Any, device: torch.device
) -> Timing:
    table = torch.tensor(samples, dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    gaps = torch.tensor([gap], dtype=torch.float64, device=device)
    dist.all_reduce(gaps, op=dist.ReduceOp.MAX, group=group)
    columns = table.cpu().T.tolist()
    ms = {phase: statistics.median(column) for phase, column in zip(PHASES, columns, strict=True)}
    sums = sorted(map(sum, table.cpu().tolist()))
    middle = statistics.median(sums)
    spread = (sums[int(0.9 * (len(sums) - 1))] - sums[int(0.1 * (len(sums) - 1))]) / middle
    plain = {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch.")}
    return Timing(name, plain, ms, sum(ms.values()), spread, gaps.item())
