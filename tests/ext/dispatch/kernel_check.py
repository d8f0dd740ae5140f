"""Compare the Triton kernels with the torch path over random shapes, on the device named: `cuda`, or `cpu` interpreted.

    python kernel_check.py DEVICE [FIRST LAST]      (seeds; each shape is compiled, so ranges in parallel save minutes)

Prints how many cases were equal, bit for bit; exits 1 with the first that is not.
"""

from __future__ import annotations

import random
import sys

import torch

from megatron_ext.dispatch import kernels, routing, routing_kernels, rows
from megatron_ext.dispatch.layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_slots(draw: random.Random, tokens: int, top_k: int) -> tuple[torch.Tensor, int]:
    """A table in which every slot is used once, about a third of the places empty."""
    places = [(t, k) for t in range(tokens) for k in range(top_k) if draw.random() > 0.35]
    numbers = list(range(len(places)))
    draw.shuffle(numbers)
    slots = torch.full((tokens, top_k), -1, dtype=torch.int32)
    for (t, k), number in zip(places, numbers, strict=True):
        slots[t, k] = number
    return slots, len(places)


def buffer(count: int, width: int, pitch: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of `width` values, `pitch` apart: a packed row is wider than its hidden values."""
    shape = (max(count, 1), pitch)
    if device == "cpu" and dtype == torch.bfloat16:
        # Triton's interpreter truncates to bf16 where the GPU rounds: small whole numbers, whose sums are exact.
        return torch.randint(-15, 16, shape).to(dtype)[:count, :width]
    return torch.randn(shape, device=device).to(dtype)[:count, :width]


def check(seed: int, device: str) -> None:
    """One random case of both kernels."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, pad = draw.choice([1, 7, 8, 24, 64, 129, 518, 2048]), draw.choice([0, 0, 1, 8, 24])
    dtype = draw.choice(DTYPES)
    slots, total = random_slots(draw, draw.choice([1, 2, 5, 9]), draw.choice([1, 2, 8]))
    split = draw.choice([None, 0, total // 2, total])
    slots_d = slots.to(device)
    src = buffer(len(slots), width, width + pad, dtype, device)
    far = buffer(total if split is None else split, width, width + pad, dtype, device)
    near = None if split is None else buffer(total - split, width, width, dtype, device)
    want_far, want_near = far.clone().cpu(), None if near is None else near.clone().cpu()
    want, got = src.clone().cpu(), torch.empty_like(src)
    if len(far) or near is not None:
        rows.sum_rows(slots, want_far, want_near, want)
        kernels.sum_rows(slots_d, far, near, got)
        assert torch.equal(got.cpu(), want), f"sum, seed {seed}: {width} {dtype} pad {pad} split {split}"
    rows.spread_rows(src.cpu(), slots, want_far, want_near)
    kernels.spread_rows(src, slots_d, far, near)
    assert torch.equal(far.cpu(), want_far), f"spread far, seed {seed}: {width} {dtype} pad {pad} split {split}"
    if near is not None and want_near is not None:
        assert torch.equal(near.cpu(), want_near), f"spread near, seed {seed}: {width} {dtype} split {split}"


def check_routing(seed: int, device: str) -> None:
    """One random case of slot tables and counts: kernels on `device` against the torch path on the CPU."""
    draw = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    ranks_per_node, nodes, local = draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 2, 8])
    world = ranks_per_node * nodes
    layout = Layout(world, draw.randrange(world), local, ranks_per_node)
    tokens, top_k = draw.choice([1, 5, 127, 129]), min(draw.choice([1, 2, 3, 8]), layout.num_experts)
    ids = torch.rand(tokens, layout.num_experts, generator=made).topk(top_k, dim=1).indices
    ids = ids.masked_fill(torch.rand(tokens, top_k, generator=made) < 0.2, -1)
    ids = routing.sort_choices(ids, torch.zeros(tokens, top_k))[0]
    there = ids.to(device)
    for to in (routing.all_ranks, routing.all_nodes, routing.node_ranks):
        want = routing.assign_slots(ids, to(layout))
        marks = torch.zeros(to(layout).number * tokens + 1, dtype=torch.int32, device=device)
        routing_kernels.mark(there, to(layout), marks)
        slots = routing_kernels.look_up(there, to(layout), marks.cumsum(0, dtype=torch.int32))
        assert torch.equal(slots.cpu(), want.slots), f"slots, seed {seed}: {to.__name__} {layout}"
    counted = torch.zeros(2 + world + nodes + layout.num_experts, dtype=torch.int32, device=device)
    routing_kernels.count(there, layout, counted)
    want_counts = routing.count_vector(ids, layout)
    assert torch.equal(counted.cpu()[1:-1], want_counts[1:-1]), f"counts, seed {seed}: {layout}"


def main() -> int:
    """Run the cases."""
    device = sys.argv[1]
    seeds = range(*(int(word) for word in sys.argv[2:4] or (0, 200 if device == "cuda" else 40)))
    for seed in seeds:
        check(seed, device)
        check_routing(seed, device)
    print(f"{len(seeds)} cases equal on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
