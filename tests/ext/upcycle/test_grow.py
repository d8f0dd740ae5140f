"""MoE to larger MoE with real Megatron: exact where it must be, ties where they must be, and what breaks them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import Layout, Moe, Shape, build, load, loss, replace, save_dense, use_groups, write_and_die
from test_verify import verify

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.runtime import cpu
from megatron_ext.upcycle import grow
from megatron_ext.upcycle.grow_spec import Growth, moe_from_args
from megatron_ext.upcycle.source import TRACKER, open_source

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(not cpu.is_installed(), reason="verify runs under the CPU runtime"),
]
ONE = Layout()
SHAPE, SMALL = Shape(layers=2), Moe(4, 2, 48)
NO_NOISE = ("--router-noise", "0")
EXACT = {
    "softmax": (SHAPE, SMALL, 2),
    "three of each": (SHAPE, SMALL, 3),
    "top-1, pre-softmax": (SHAPE, Moe(4, 1, 48, 1, {"moe_router_pre_softmax": True}), 2),
    "sigmoid, expert bias, factor, biases": (Shape("gelu", biases=True, layers=2), Moe(4, 2, 48, 1, {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5}), 2),
    "groups": (SHAPE, Moe(8, 2, 16, 1, {"moe_router_num_groups": 4, "moe_router_group_topk": 2}), 2),
    "mixed layers, shared expert": (Shape("squared_relu", layers=3), Moe(4, 2, 48, [1, 0, 1], {
        "moe_shared_expert_intermediate_size": 16}), 2),
    "multi-token prediction, tied": (Shape(layers=2, mtp=1, tied=True), SMALL, 2),
    "bf16": (Shape(layers=2, dtype=torch.bfloat16), SMALL, 2),
}  # fmt: skip


def save_small(root: Path, shape: Shape, moe: Moe) -> list[Any]:
    use_groups(ONE)
    chunks = build(shape, ONE, moe)
    if moe.more.get("moe_router_enable_expert_bias"):
        for module in chunks[0].modules():
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias.copy_(torch.linspace(-0.3, 0.3, moe.experts))
    save_dense(chunks, root / "dense", shape, moe)
    return chunks


def grow_it(root: Path, total: int, *flags: str, name: str = "moe", status: int = 0) -> None:
    words = ["upcycle", str(root / "dense"), str(root / name), "--num-experts", str(total), *flags]
    assert main(words) == status


@pytest.mark.parametrize("name", EXACT)
def test_exact_copies_with_top_k_times_m_are_the_same_function(name, tmp_path, capsys):
    shape, moe, times = EXACT[name]
    chunks = save_small(tmp_path, shape, moe)
    before = loss(chunks, shape)
    grow_it(tmp_path, times * moe.experts, "--router-topk", str(times * moe.topk), *NO_NOISE)
    # Megatron's own loader first: names, shapes and values are those of a checkpoint of the larger model.
    larger = build(shape, ONE, replace(moe, experts=times * moe.experts, topk=times * moe.topk))
    assert abs(loss(larger, shape) - before) > 5e-3
    load(larger, tmp_path / "moe" / "release")
    low = shape.dtype == torch.bfloat16
    assert loss(larger, shape) == pytest.approx(before, abs=1e-3 if low else 1e-5)
    found = verify(tmp_path, capsys)
    assert found["promise"]["kind"] == "exact"
    for one in found["survey"]["experts"]:
        assert (one["count"], one["distinct"], one["kept"]) == (times * moe.experts, moe.experts, moe.experts)
    for old, new in zip(found["routing"]["source"], found["routing"]["target"], strict=True):
        assert old["tied"] == 0
        assert (new["tied"], new["twins"], new["origins"]) == (1, 1, old["origins"])


def test_one_saved_under_older_names_grows_under_these(tmp_path, capsys):
    use_groups(ONE)
    chunks = build(SHAPE, ONE, SMALL)
    with torch.no_grad():
        for layer in chunks[0].decoder.layers:
            layer.pre_mlp_layernorm.weight.mul_(1.5)
    save_dense(chunks, tmp_path / "dense", SHAPE, SMALL, older=True)
    grow_it(tmp_path, 8, "--router-topk", "4", *NO_NOISE)
    larger = build(SHAPE, ONE, replace(SMALL, experts=8, topk=4))
    load(larger, tmp_path / "moe" / "release")
    assert loss(larger, SHAPE) == pytest.approx(loss(chunks, SHAPE), abs=1e-5)
    assert verify(tmp_path, capsys)["promise"]["kind"] == "exact"
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in open_source(tmp_path / "moe").tensors


@pytest.fixture(scope="module")
def small(world: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    save_small(root, SHAPE, SMALL)
    return root


def measured(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    (tmp_path / "dense").symlink_to(small / "dense")
    grow_it(tmp_path, 8, *flags)
    found = verify(tmp_path, capsys)
    routers = found["routing"]
    assert [one["tied"] for one in routers["exact_copies"]] == [1, 1]
    return {
        "kind": found["promise"]["kind"],
        "tied": max(one["tied"] for one in routers["target"]),
        "twins": max(one["twins"] for one in routers["target"]),
        "origins": min(one["origins"] for one in routers["target"]),
        "distinct": {one["distinct"] for one in found["survey"]["experts"]},
        "off": max(one["alone"] for one in found["differences"]["layers"]),
    }


def test_exact_copies_at_the_old_top_k_tie(small, tmp_path, capsys):
    found = measured(small, tmp_path, capsys, *NO_NOISE)
    # Every token takes its best expert and that one's twin: its second choice is lost.
    assert (found["kind"], found["tied"], found["twins"], found["origins"]) == ("changed", 1, 1, 1)
    assert found["distinct"] == {4}
    assert found["off"] > 0.05


def test_noise_on_the_router_breaks_ties_and_noise_on_the_experts_makes_them_different(small, tmp_path, capsys):
    found = measured(small, tmp_path, capsys, "--router-topk", "4", "--expert-noise", "0.001")
    assert (found["kind"], found["tied"], found["twins"]) == ("close", 0, 0)
    assert found["distinct"] == {8}
    assert 0 < found["off"] < 0.1


def test_a_shift_leaves_most_tokens_their_experts_at_the_old_top_k(small, tmp_path, capsys):
    copies = tmp_path / "copies"
    copies.mkdir()
    plain = measured(small, copies, capsys, *NO_NOISE)
    found = measured(small, tmp_path, capsys, *NO_NOISE, "--router-shift", "8")
    assert (found["tied"], found["distinct"]) == (0, {4})
    assert found["origins"] > 1.7
    assert found["off"] < plain["off"] / 2


@pytest.mark.parametrize("kind", ["drop", "random"])
def test_new_experts_stand_beside_the_old_ones(small, tmp_path, capsys, kind):
    found = measured(small, tmp_path, capsys, "--new-experts", kind)
    assert (found["kind"], found["tied"], found["twins"], found["distinct"]) == ("changed", 0, 0, {8})
    old, new = open_source(small / "dense"), open_source(tmp_path / "moe")
    name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    before, after = old.read(name), new.read(name)
    assert torch.equal(after[:, ::2], before)
    kept = (after[:, 1::2] == before).float().mean()
    assert float(kept) == (pytest.approx(0.5) if kind == "drop" else 0.0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "number of experts is missing"),
        (["--num-experts", "6"], "whole copies of the smaller one"),
        (["--num-experts", "4"], "whole copies of the smaller one"),
        (["--num-experts", "8", "--router-topk", "9"], "cannot choose that many"),
        (["--num-experts", "8", "--router-topk", "0"], "cannot choose that many"),
        (["--num-experts", "8", "--new-experts", "drop", "--drop-share", "1.5"], "not a share"),
        (["--num-experts", "8", "--drop-share", "0.5"], "nothing to drop"),
        (["--num-experts", "8", "--router-noise", "-1"], "negative"),
        (["--num-experts", "8", "--new-experts", "random", "--expert-noise", "0.1"], "nothing to perturb"),
        (["--num-experts", "8", "--scaling", "none"], "does not fit this source"),
        (["--num-experts", "8", "--carry-schedule", "--new-experts", "magic"], "invalid choice"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_before_writing(small, tmp_path, capsys, flags, says):
    made = tmp_path / "moe"
    assert main(["upcycle", str(small / "dense"), str(made), *flags]) == 64
    assert says in capsys.readouterr().err
    assert not made.exists()


def test_growth_flags_do_not_fit_a_dense_source(tmp_path, capsys):
    use_groups(ONE)
    save_dense(build(SHAPE, ONE), tmp_path / "dense", SHAPE)
    grow_it(tmp_path, 8, "--router-shift", "4", status=64)
    assert "the source is dense" in capsys.readouterr().err


def test_experts_that_are_not_as_promised_are_refused(small):
    source = open_source(small / "dense")
    source.args.num_experts = 8
    with pytest.raises(UserError, match="holds 4 experts"):
        grow.plan_content(source, moe_from_args(source.args), Growth(2, 2))
    lacking = {name: one for name, one in source.tensors.items() if ".experts." not in name}
    other = type(source)(source.root, source.folder, 12, lacking, source.objects, source.common)
    with pytest.raises(UserError, match="holds none"):
        grow.plan_content(other, moe_from_args(source.args), Growth(2, 2))


@pytest.mark.parametrize("after", [1, 20])
def test_a_killed_growth_never_loads_as_complete(small, tmp_path, after):
    made = tmp_path / "moe"
    child = os.fork()
    if child == 0:
        _grow_and_die(small / "dense", made, after)
    assert os.waitpid(child, 0)[1] != 0
    assert not (made / TRACKER).exists()
    with pytest.raises(UserError, match="no checkpoint here"):
        open_source(made)
    assert main(["upcycle", str(small / "dense"), str(made), "--num-experts", "8"]) == 0
    assert sorted(path.name for path in made.iterdir()) == [TRACKER, "release"]


def _grow_and_die(small: Path, made: Path, after: int) -> None:
    source = open_source(small)
    content = grow.plan_content(source, moe_from_args(source.args), Growth(2, 2))
    write_and_die(made, content, after)


def test_the_schedule_and_the_data_go_on_as_asked(small, tmp_path):
    (tmp_path / "dense").symlink_to(small / "dense")
    grow_it(tmp_path, 8, "--carry-schedule", name="on")
    grow_it(tmp_path, 8, "--restart-data", name="again")
    on, again = open_source(tmp_path / "on"), open_source(tmp_path / "again")
    assert (on.iteration, on.args.consumed_train_samples) == (12, 48)
    assert (on.args.num_experts, on.args.moe_router_topk) == (8, 2)
    assert (again.iteration, again.args.consumed_train_samples) == (0, 0)
