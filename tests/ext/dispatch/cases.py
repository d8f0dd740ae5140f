"""One random mixture of experts per seed, known to every rank, and the check of a dispatcher against the dense one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ext.dispatch.autograd import Room, combine, dispatch, from_experts, to_experts
from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.reference import dense_moe
from megatron_ext.dispatch.routing import sort_choices
from megatron_ext.dispatch.transport import Groups, make_groups


@dataclass(frozen=True)
class Case:
    """One shape. `tokens` has one number a rank; `empty` is the share of choices left out (capacity drops, padding
    tokens); `skew` sends most choices to the first experts; `align` pads each expert's rows. With `expert_tp` ranks
    to an expert, a choice of an expert is one of all its shards, as Megatron's flex dispatcher numbers them; a
    shard counts as an expert in `num_local_experts`."""

    seed: int
    ep: int
    ranks_per_node: int
    num_local_experts: int
    top_k: int
    hidden: int
    tokens: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    empty: float = 0.0
    skew: bool = False
    align: int = 0
    static: bool | None = None
    two_hops: bool = True
    recompute: bool = False
    expert_tp: int = 1

    @property
    def num_experts(self) -> int:
        return self.ep * self.num_local_experts

    @property
    def whole_experts(self) -> int:
        """Experts, each of `expert_tp` shards."""
        return self.num_experts // self.expert_tp

    def shards(self, ids: Tensor) -> Tensor:
        """Experts [T, k], -1 for none, to the shards of each: [T, k, expert_tp]."""
        local = self.num_local_experts
        first = ids.div(local, rounding_mode="floor") * self.expert_tp * local + ids % local
        shards = first.unsqueeze(-1) + local * torch.arange(self.expert_tp)
        return torch.where(ids.unsqueeze(-1) >= 0, shards, -1)


def random_case(seed: int, ep: int) -> Case:
    """Draw a shape; every seed gives the same on all ranks."""
    draw = random.Random(seed * 1000 + ep)
    num_experts = draw.choice([n for n in (8, 16, 32, 64, 128, 256) if n % ep == 0])
    tokens = tuple(draw.choice([0, 1, 3, 8, 17]) for _ in range(ep))
    static = draw.choice([None, True, False])
    if static is not False:  # the static form needs one number, or a capacity
        tokens = tuple(min(t, 8) for t in tokens)
    case = Case(
        seed=seed,
        ep=ep,
        ranks_per_node=draw.choice([n for n in (1, 2, 4, 8) if n <= ep]),
        num_local_experts=num_experts // ep,
        top_k=draw.randint(1, min(8, num_experts)),
        hidden=draw.choice([1, 4, 7, 16, 24]),
        tokens=tokens,
        dtype=draw.choice([torch.float32, torch.float32, torch.bfloat16]),
        empty=draw.choice([0.0, 0.0, 0.3, 1.0]),
        skew=draw.random() < 0.3,
        align=draw.choice([0, 0, 16]),
        static=static,
        two_hops=draw.random() < 0.7,
        recompute=draw.random() < 0.3,
    )
    halved = draw.random() < 0.3 and case.top_k <= case.num_experts // 2
    return replace(case, expert_tp=2 if halved else 1)


@dataclass(frozen=True)
class Data:
    """What all ranks hold: x, ids, weights and the output's gradient of every rank, and the experts' matrices."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    grads: list[Tensor]
    experts: Tensor


def make_data(case: Case) -> Data:
    made = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    ids, weights = [], []
    for tokens in case.tokens:
        score = torch.rand(tokens, case.whole_experts, generator=made)
        if case.skew:
            score[:, : max(1, case.whole_experts // 8)] += 0.7
        chosen = score.topk(case.top_k, dim=1).indices
        dropped = torch.rand(tokens, case.top_k, generator=made) < case.empty
        order = torch.rand(tokens, case.top_k, generator=made).argsort(dim=1)
        chosen = chosen.masked_fill(dropped, -1).gather(1, order)
        weight = torch.rand(tokens, case.top_k, generator=made)
        pair = sort_choices(case.shards(chosen).flatten(1), weight.repeat_interleave(case.expert_tp, dim=1))
        ids.append(pair[0])
        weights.append(pair[1])
    hidden, num = case.hidden, case.num_experts
    return Data(
        [normal(t, hidden).to(case.dtype) for t in case.tokens],
        ids,
        weights,
        [normal(t, hidden).to(case.dtype) for t in case.tokens],
        (normal(num, hidden, hidden) / hidden**0.5).to(case.dtype),
    )


def to_device(data: Data, device: torch.device) -> Data:
    def moved(tensors: list[Tensor]) -> list[Tensor]:
        return [t.to(device) for t in tensors]

    return Data(*map(moved, (data.x, data.ids, data.weights, data.grads)), data.experts.to(device))


def run_dispatcher(case: Case, data: Data, rank: int, groups: Groups) -> list[Tensor]:
    """Forward and both gradients through the dispatcher: output, grad of x, grad of weights, grad of experts."""
    layout = Layout(case.ep, rank, case.num_local_experts, case.ranks_per_node)
    engine = Engine(layout, groups, static=case.static, capacity=max(case.tokens))
    first = rank * case.num_local_experts
    last = first + case.num_local_experts
    served = sum(int(((ids >= first) & (ids < last)).sum()) for ids in data.ids)
    x, weights = data.x[rank].clone().requires_grad_(), data.weights[rank].clone().requires_grad_()
    mine = data.experts[first:last].clone().requires_grad_()

    def layer(x: Tensor, weights: Tensor, mine: Tensor) -> Tensor:
        rows, row_weights, handle = dispatch(engine, x, data.ids[rank], weights)
        # Every other case takes the counts where the rows are, as experts do that read them there.
        on_device = case.seed % 2 == 1
        # No guess, too little room, room for the rows without gaps, and for all with some to spare.
        room = Room((0, 1, served, served + case.num_local_experts * case.align + 5)[case.seed % 4])
        out, flat, order, counts = to_experts(
            rows, row_weights, handle, align=case.align, counts_on_device=on_device, room=room
        )
        assert room.rows == len(out) == len(flat)
        assert counts.is_cuda == (on_device and x.is_cuda)
        assert not case.align or (counts % case.align == 0).all()
        parts = [
            torch.tanh(part @ mine[e]) * w.unsqueeze(1).to(part.dtype)
            for e, (part, w) in enumerate(zip(out.split(counts.tolist()), flat.split(counts.tolist()), strict=True))
        ]
        return combine(engine, from_experts(torch.cat(parts), order, gaps=case.align > 1), handle)

    if case.recompute:
        result = checkpoint(layer, x, weights, mine, use_reentrant=False)
    else:
        result = layer(x, weights, mine)
    result.backward(data.grads[rank])
    return [result.detach(), x.grad, weights.grad, mine.grad]


def run_dense(case: Case, data: Data) -> list[list[Tensor]]:
    """The same in one process over all ranks' tokens, in fp32 (bf16 data cast up)."""
    x = [t.float().requires_grad_() for t in data.x]
    weights = [w.clone().requires_grad_() for w in data.weights]
    experts = data.experts.float().requires_grad_()
    out = dense_moe(
        torch.cat(x),
        torch.cat(data.ids),
        torch.cat(weights),
        lambda e, part: torch.tanh(part @ experts[e]),
        case.num_experts,
    )
    if out.requires_grad:  # not when no token chose any expert
        out.backward(torch.cat(data.grads).float())
    parts = out.detach().split(list(case.tokens))
    zero = torch.zeros_like(experts)
    grads = experts.grad if experts.grad is not None else zero
    per_rank = grads.split(case.num_local_experts)
    return [[parts[r], _grad(x[r]), _grad(weights[r]), per_rank[r]] for r in range(case.ep)]


def _grad(leaf: Tensor) -> Tensor:
    return leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)


_groups: dict[tuple[int, bool], Groups] = {}


def run_case_on(case: Case, rank: int, device: torch.device) -> None:
    """Check a case over the whole default group, on a device."""
    check_case(case, rank, groups_for(case, rank, dist.group.WORLD, _groups), device)


def check_case(case: Case, rank: int, groups: Groups, device: torch.device | None = None) -> None:
    """Compare one rank of a case with the dense reference, and with a second run of itself bit for bit."""
    data = make_data(case)
    if device is not None:
        data = to_device(data, device)
    got, again = (run_dispatcher(case, data, rank, groups) for _ in range(2))
    want = run_dense(case, data)[rank]
    bound = 2e-6 if case.dtype == torch.float32 else 4e-2
    for name, one, two, right in zip(
        ("output", "grad x", "grad weights", "grad experts"), got, again, want, strict=True
    ):
        assert torch.equal(one, two), f"{case}: {name} differs when repeated"
        gap = (one.float() - right).abs().max().item() if one.numel() else 0.0
        scale = max(1.0, right.abs().max().item() if right.numel() else 1.0)
        assert gap <= bound * scale, f"{case}: rank {rank}: {name} is off by {gap} at scale {scale}"


def groups_for(case: Case, rank: int, world_group: object, cache: dict[tuple[int, bool], Groups]) -> Groups:
    """Make (once) the groups of a node size."""
    two_hops = case.two_hops
    key = (case.ranks_per_node if two_hops else 0, two_hops)
    if key not in cache:
        layout = Layout(case.ep, rank, case.num_local_experts, case.ranks_per_node)
        cache[key] = make_groups(layout, world_group, two_hops=two_hops)
    return cache[key]


def cases_of_group(group: int, ep: int, seeds: list[int]) -> list[Case]:
    """The cases that group `group` runs, at the same time as the other groups run theirs."""
    return [random_case(seed + 1000 * group, ep) for seed in seeds]


def run_cases(rank: int, world: int, ep: int, seeds: list[int], changes: dict[str, object]) -> int:
    """Run cases over groups of `ep` ranks out of `world`, every group its own."""
    starts = range(0, world, ep)
    mine = None
    for start in starts:
        group = dist.new_group(list(range(start, start + ep)))
        if start <= rank < start + ep:
            mine = group
    cache: dict[tuple[int, bool], Groups] = {}
    for drawn in cases_of_group(rank // ep, ep, seeds):
        case = replace(drawn, **changes)
        check_case(case, rank % ep, groups_for(case, rank % ep, mine, cache))
    return len(seeds) * len(starts)
