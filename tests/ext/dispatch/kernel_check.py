"""Compare the Triton kernels with the torch path over random shapes, on the device named: `cuda`, or `cpu` interpreted.

    python kernel_check.py DEVICE [FIRST LAST]      (seeds; each shape is compiled, so ranges in parallel save minutes)

Prints how many cases were equal, bit for bit; exits 1 with the first that is not.
"""

from __future__ import annotations

import random
import sys

import torch

from megatron_ext.dispatch import (
    choice_kernels,
    kernels,
    routing,
    routing_kernels,
    rows,
    weight_kernels,
    wire_kernels,
)
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.wire import RowFormat

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
    ranks_per_node, nodes, local = draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 2, 3, 8, 40])
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
        slots, counts = routing_kernels.look_up(there, to(layout), marks.cumsum(0, dtype=torch.int32))
        assert torch.equal(slots.cpu(), want.slots), f"slots, seed {seed}: {to.__name__} {layout}"
        assert torch.equal(counts.cpu(), want.counts), f"rows, seed {seed}: {to.__name__} {layout}"
    for rows_of in (ids, ids[:0]):
        here = f"seed {seed}: {len(rows_of)} tokens, {layout}"
        fixed = routing_kernels.fixed_slots(rows_of.to(device), routing.all_ranks(layout), tokens + 3)
        assert torch.equal(fixed.cpu(), routing.fixed_slots(rows_of, routing.all_ranks(layout), tokens + 3)), here
        counted = torch.zeros(routing.count_size(layout), dtype=torch.int32, device=device)
        routing_kernels.count(rows_of.to(device), layout, counted)
        assert torch.equal(counted.cpu(), routing.count_vector(rows_of, layout)), f"counts, {here}"


def check_choices(seed: int, device: str) -> None:
    """One random case of the choices, their way over the wire and into expert order, and the gradients."""
    draw = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    num_experts, top_k = draw.choice([(1, 1), (6, 2), (8, 8), (3, 5), (64, 8), (48, 6), (300, 3), (40_000, 2)])
    tokens = draw.choice([0, 1, 7] if num_experts > 1000 else [0, 1, 33, 257])
    dtype = draw.choice(DTYPES)
    here = f"seed {seed}: {tokens} tokens, {top_k} of {num_experts}, {dtype}"
    chosen = torch.zeros(tokens, num_experts, dtype=torch.bool)
    picked = torch.rand(tokens, num_experts, generator=made).topk(min(top_k, num_experts), dim=1).indices
    kept = torch.rand(picked.shape, generator=made) > draw.choice([0.0, 0.3, 1.0])
    chosen.scatter_(1, picked, kept)
    probs = torch.randn(tokens, num_experts, generator=made).to(dtype)
    ids, weights = routing.choose(chosen, probs, top_k)
    got_ids, got_weights = choice_kernels.choose(chosen.to(device), probs.to(device), top_k)
    assert torch.equal(got_ids.cpu(), ids), f"ids, {here}"
    assert torch.equal(got_weights.cpu(), weights), f"weights, {here}"
    grad = choice_kernels.choose_grad(got_ids, got_weights, num_experts)
    assert torch.equal(grad.cpu(), routing.choose_grad(ids, weights, num_experts)), f"gradient, {here}"
    assert torch.equal(grad.cpu(), probs.masked_fill(~chosen, 0)), f"gradient against the map, {here}"

    form = RowFormat(draw.choice([1, 5, 16]), top_k, torch.bfloat16, dtype, num_experts)
    first, empty = draw.choice([0, num_experts // 2]), draw.choice([0, 3])
    packed = torch.full((tokens + empty, form.row_bytes), 255, dtype=torch.uint8)
    there = packed.to(device, copy=True)
    form.write_meta(weights, ids, form.meta_view(packed))
    wire_kernels.pack(got_weights, got_ids, form.meta_view(there), form.id_dtype.itemsize // 2)
    assert torch.equal(there.cpu(), packed), f"packed, {here}"
    want_weights, want_ids = form.unpack_meta(packed, first)
    got = wire_kernels.unpack(form.meta_view(there), dtype, top_k, form.id_dtype.itemsize // 2, first)
    assert torch.equal(got[0].cpu(), want_weights), f"unpacked weights, {here}"
    assert torch.equal(got[1].cpu(), want_ids), f"unpacked ids, {here}"

    if tokens == 0:
        return
    slots = routing.expert_slots(want_ids, num_experts).slots
    flat = torch.full((int(slots.max()) + 2,), 3.0, dtype=dtype)
    flat_there, back = flat.to(device, copy=True), torch.empty_like(got[0])
    rows.spread_weights(want_weights, slots, flat)
    weight_kernels.spread_weights(got[0], slots.to(device), flat_there)
    assert torch.equal(flat_there.cpu(), flat), f"weights in expert order, {here}"
    weight_kernels.gather_weights(flat_there, slots.to(device), back)
    assert torch.equal(back.cpu(), rows.gather_weights(flat, slots)), f"gathered weights, {here}"


def main() -> int:
    """Run the cases."""
    device = sys.argv[1]
    seeds = range(*(int(word) for word in sys.argv[2:4] or (0, 30)))
    for seed in seeds:
        check(seed, device)
        check_routing(seed, device)
        check_choices(seed, device)
    print(f"{len(seeds)} cases equal on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
