"""The arithmetic of growth on hand-made tensors: who stays, which channels go, which statistics come."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.upcycle import grow, grow_weights
from megatron_ext.upcycle.grow_spec import Growth, Moe, expectation
from megatron_ext.upcycle.grow_weights import FC1, FC1_BIAS, FC2, FC2_BIAS
from megatron_ext.upcycle.router import RouterRule

HIDDEN, WIDTH = 24, 40


def moe(rule: RouterRule, *, gated: bool = True, balancing: str = "aux_loss") -> Moe:
    return Moe(rule, num_layers=4, gated=gated, interleaved=False, init_std=0.02, group_topk=None, balancing=balancing)


def parts(gated: bool) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    wide = WIDTH * (2 if gated else 1)
    # Gate, up and down projections with statistics that cannot be mixed up.
    fc1 = torch.randn(wide, HIDDEN, generator=rng)
    fc1[WIDTH:] = fc1[WIDTH:] * 5 + 30
    return {FC1: fc1, FC2: torch.randn(HIDDEN, WIDTH, generator=rng) * 0.1 - 7,
            FC1_BIAS: torch.randn(wide, generator=rng), FC2_BIAS: torch.randn(HIDDEN, generator=rng)}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("share", "dropped"), [(0.5, 20), (0.3, 12), (1.0, 40), (0.01, 0)])
def test_drop_takes_the_same_channels_from_every_projection(gated, share, dropped):
    channels = grow_weights.dropped_channels(WIDTH, share, seed=1, name="e")
    assert len(channels) == len(set(channels.tolist())) == dropped
    kept = torch.tensor([c for c in range(WIDTH) if c not in channels], dtype=torch.int64)
    for part, old in parts(gated).items():
        new = grow_weights.redrawn(part, old, channels, gated=gated, seed=1, name=part)
        if part == FC2_BIAS:
            assert torch.equal(new, old)
            continue
        halves = zip(old.chunk(2), new.chunk(2), strict=True) if gated and part != FC2 else [(old, new)]
        for before, after in halves:
            axis = 1 if part == FC2 else 0
            assert torch.equal(before.index_select(axis, kept), after.index_select(axis, kept))
            assert not (before.index_select(axis, channels) == after.index_select(axis, channels)).any()


def test_drop_draws_from_the_statistics_of_what_it_replaces():
    channels = grow_weights.dropped_channels(WIDTH, 0.5, seed=1, name="e")
    tensors = parts(True)
    up_rows = tensors[FC1][channels + WIDTH]
    new = grow_weights.redrawn(FC1, tensors[FC1], channels, gated=True, seed=1, name="n")[channels + WIDTH]
    count = up_rows.numel()
    assert float(new.mean()) == pytest.approx(float(up_rows.mean()), abs=4 * float(up_rows.std()) / count**0.5)
    assert float(new.std()) == pytest.approx(float(up_rows.std()), rel=0.15)
    down = tensors[FC2][:, channels]
    drawn = grow_weights.redrawn(FC2, tensors[FC2], channels, gated=True, seed=1, name="n")[:, channels]
    assert float(drawn.mean()) == pytest.approx(float(down.mean()), abs=0.02)
    assert float(drawn.std()) == pytest.approx(float(down.std()), rel=0.15)


def test_draws_depend_on_seed_and_name_alone():
    old = parts(True)[FC1]

    def made(seed: int, index: int) -> torch.Tensor:
        growth = Growth(3, 2, "drop", seed=seed)
        return grow.expert_tensor(old, FC1, moe(RouterRule(4, 2)), growth, "decoder.layers.0.", index)

    assert torch.equal(made(1, 4), made(1, 4))
    assert not torch.equal(made(1, 4), made(1, 5))
    assert not torch.equal(made(1, 4), made(2, 4))
    assert torch.equal(made(1, 3), old)  # copy 0 of expert 1


def test_router_rows_stand_side_by_side_and_noise_is_relative():
    old = torch.randn(4, 512, generator=torch.Generator().manual_seed(5)) * torch.tensor([[1.0], [10], [100], [1000]])
    name = "decoder.layers.0.mlp.router.weight"
    exact = grow.router_tensor(old, moe(RouterRule(4, 2)), Growth(2, 2), name)
    assert torch.equal(exact, old.repeat_interleave(2, 0))
    noisy = grow.router_tensor(old, moe(RouterRule(4, 2)), Growth(2, 2, router_noise=0.05), name)
    assert torch.equal(noisy[::2], old)
    relative = (noisy[1::2] - old).norm(dim=1) / old.norm(dim=1)
    assert relative.tolist() == pytest.approx([0.05] * 4, rel=0.2)
    bias = torch.tensor([1.0, 2, 3, 4])
    twice = grow.router_tensor(bias, moe(RouterRule(4, 2)), Growth(2, 2, router_noise=0.05), "mlp.router.expert_bias")
    assert twice.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_shift_is_one_vector_for_a_set_of_copies():
    old = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    name = "decoder.layers.0.mlp.router.weight"
    new = grow.router_tensor(old, moe(RouterRule(4, 2)), Growth(3, 2, router_shift=4), name)
    for copy in (1, 2):
        moved = new[copy::3] - old
        assert torch.allclose(moved, moved[:1].expand(4, -1), atol=1e-5)
        assert float(moved[0].norm()) == pytest.approx(4 * 8, rel=0.4)  # a row has length 8
    assert torch.equal(new[::3], old)


@pytest.mark.parametrize(
    ("rule", "growth", "kind"),
    [
        (RouterRule(4, 2), Growth(2, 4), "exact"),
        (RouterRule(4, 1, pre_softmax=True), Growth(3, 3), "exact"),
        (RouterRule(4, 2, score="sigmoid"), Growth(2, 4), "exact"),
        # Megatron normalizes sigmoid scores for top-k above 1 only.
        (RouterRule(4, 1, score="sigmoid"), Growth(2, 2), "changed"),
        (RouterRule(4, 2), Growth(2, 4, router_noise=0.01), "close"),
        (RouterRule(4, 2), Growth(2, 4, router_noise=0.5), "changed"),
        (RouterRule(4, 2), Growth(2, 4, router_shift=4), "changed"),
        (RouterRule(4, 2), Growth(2, 2), "changed"),
        (RouterRule(4, 2), Growth(2, 4, "drop"), "changed"),
        (RouterRule(4, 2), Growth(2, 4, "random"), "changed"),
    ],
)
def test_what_is_promised(rule, growth, kind):
    assert expectation(moe(rule), growth).kind == kind
