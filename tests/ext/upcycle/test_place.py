"""Experts numbered anew: even by rank, the same function in real Megatron, and refusals that write nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpt import Layout, Moe, Shape, build, load, loss, use_groups
from test_grow import ONE, save_small

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.place import balance, renumber
from megatron_ext.tracking.lines import routing_line
from megatron_ext.tracking.rundir import ROUTING_FILE, RUN_FILE
from megatron_ext.upcycle.source import Source, StoredTensor, open_source

pytestmark = pytest.mark.usefixtures("world")
SHAPES = {
    "all MoE, sigmoid, expert bias": (Shape(layers=2), Moe(8, 2, 16, 1, {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True})),
    "mixed layers, shared expert": (Shape("squared_relu", layers=3), Moe(8, 2, 16, [1, 0, 1], {
        "moe_shared_expert_intermediate_size": 16})),
    "biases": (Shape("gelu", biases=True, layers=2), Moe(8, 2, 16)),
    "multi-token prediction": (Shape(layers=2, mtp=1), Moe(8, 2, 16)),
}  # fmt: skip


def best(counts: np.ndarray, ranks: int) -> int:
    """Return the smallest load that the fullest rank can have, by trying all ways."""
    size = len(counts) // ranks
    if ranks == 1:
        return int(counts.sum())
    whole = range(len(counts))
    return min(
        max(int(counts[list(chosen)].sum()), best(np.delete(counts, chosen), ranks - 1))
        for chosen in itertools.combinations(whole, size)
    )


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 4), (9, 3)])
def test_ranks_get_nearly_as_many_tokens_as_can_be(experts: int, ranks: int) -> None:
    rng = np.random.default_rng(experts * ranks)
    for _ in range(20):
        counts = rng.integers(1, 1000, experts)
        order = balance.even_order(counts, ranks)
        assert sorted(order.tolist()) == list(range(experts))
        after = balance.excess(counts[order], ranks)
        assert after <= balance.excess(counts, ranks)
        # Graham's bound for this rule is 4/3; with as many experts a rank it holds on these too.
        assert (1 + after) * counts.sum() / ranks <= best(counts, ranks) * 4 / 3


def test_what_is_even_stays_and_little_moves() -> None:
    assert balance.even_order(np.full(8, 5), 4).tolist() == list(range(8))
    assert balance.even_order(np.zeros(8, dtype=np.int64), 4).tolist() == list(range(8))
    # One pair exchanged makes it even: the four others keep their numbers.
    order = balance.even_order(np.array([9, 8, 1, 2, 5, 5]), 3)
    assert order[4:].tolist() == [4, 5]
    assert balance.excess(np.array([9, 8, 1, 2, 5, 5])[order], 3) == 0


def recorded(root: Path, counts: np.ndarray, *, step: int = 12) -> Path:
    """Write a run directory whose samples count these tokens: int64 [samples, L, E], the last at `step`."""
    run = root / "run"
    run.mkdir()
    (run / RUN_FILE).write_text(json.dumps({"id": "a", "name": "a"}))
    frames = [
        routing_line(1, step - len(counts) + 1 + at, list(range(counts.shape[1])), of, {})
        for at, of in enumerate(counts)
    ]
    (run / ROUTING_FILE).write_bytes(b"\n".join(frames) + b"\n")
    return run


def uneven(layers: int, experts: int = 8, samples: int = 2) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 1000, (samples, layers, experts))


@pytest.mark.parametrize("name", SHAPES)
def test_a_placed_checkpoint_is_the_same_function(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, moe = SHAPES[name]
    chunks = save_small(tmp_path, shape, moe)
    counts = uneven(shape.layers)
    run = recorded(tmp_path, counts)
    words = ["place", str(tmp_path / "dense"), str(tmp_path / "placed"), "--run", str(run), "--ranks", "4", "--json"]
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "placed").exists()
    capsys.readouterr()
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert json.loads((Path(said["written"]) / "placement.json").read_text())["layers"] == said["layers"]
    freq = moe.freq if isinstance(moe.freq, list) else [1] * shape.layers
    old, new = open_source(tmp_path / "dense"), open_source(tmp_path / "placed")
    for layer, is_moe in enumerate(freq):
        order = said["layers"][str(layer)]["order"]
        assert order == balance.even_order(counts[:, layer].sum(0), 4).tolist()
        if is_moe:
            assert order != list(range(8))
            assert torch.equal(router(new, layer), router(old, layer)[order])
    # Another model, into which Megatron's own loader puts the placed one.
    other = build(shape, ONE, moe)
    assert abs((loss(other, shape) or 0) - (loss(chunks, shape) or 0)) > 1e-3
    load(other, Path(said["written"]))
    assert loss(other, shape) == pytest.approx(loss(chunks, shape), abs=1e-5)
    assert main(["place", words[2], str(tmp_path / "again"), *words[3:]]) == 1
    assert "placed already" in capsys.readouterr().err


def router(source: Source, layer: int) -> torch.Tensor:
    stacked = "decoder.layers.mlp.router.weight"
    return source.read(stacked)[layer] if stacked in source.tensors else source.read(
        f"decoder.layers.{layer}.mlp.router.weight")  # fmt: skip


@pytest.fixture(scope="module")
def small(world: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    use_groups(Layout())
    save_small(root, *SHAPES["multi-token prediction"])
    recorded(root, uneven(2))
    return root


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ranks", "3"], "8 experts do not divide"),
        (["--ranks", "1"], "one rank has all experts anyway"),
        ([], "one rank has all experts anyway"),
        (["--ranks", "2", "--frames", "0"], "not a whole number of 1 or more"),
        (["--ranks", "2", "--run", "nowhere"], "no such run directory"),
    ],
)
def test_what_cannot_be_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    words = ["place", str(small / "dense"), str(tmp_path / "placed"), "--run", str(small / "run"), *flags]
    assert main(words) in (1, 64)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "placed").exists()


@pytest.mark.parametrize(
    ("counts", "step", "says"),
    [(uneven(2, experts=16), 12, "two models"), (uneven(2), 40, "no routing counts up to the checkpoint")],
)
def test_a_run_of_another_model_or_time_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], counts: np.ndarray, step: int, says: str
) -> None:
    run = recorded(tmp_path, counts, step=step)
    words = ["place", str(small / "dense"), str(tmp_path / "placed"), "--run", str(run), "--ranks", "2"]
    assert main(words) == 1
    assert says in capsys.readouterr().err


def test_counts_of_before_a_restart_are_left_out(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded(tmp_path, uneven(2), step=6)
    later = np.random.default_rng(4).integers(1, 1000, (2, 8))
    with (run / ROUTING_FILE).open("ab") as file:
        file.write(routing_line(2, 10, [0, 1], later, {}) + b"\n")
    words = ["place", str(small / "dense"), str(tmp_path / "placed"), "--run", str(run), "--ranks", "2"]
    assert main([*words, "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == [10]
    assert said["layers"]["1"]["order"] == balance.even_order(later[1], 2).tolist()
    assert said["layers"]["1"]["last_sample_placed_by_earlier"] is None


def test_state_stored_by_place_and_routing_groups_are_refused(small: Path) -> None:
    source = open_source(small / "dense")
    by_place = "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"
    stored = StoredTensor(by_place, (8,), torch.float32, ())
    with_state = changed(source, tensors={**source.tensors, by_place: stored})
    with pytest.raises(UserError, match="stored by its place") as refusal:
        renumber.plan_content(with_state, {}, {})
    assert "--dist-ckpt-optim-fully-reshardable" in refusal.value.remedy
    left = renumber.plan_content(with_state, {}, {}, weights_only=True)
    assert by_place not in {block.name for block in left.blocks}
    grouped = SimpleNamespace(**{**vars(source.args), "moe_router_num_groups": 4})
    with pytest.raises(UserError, match="routing groups"):
        renumber.experts_of(changed(source, common={**source.common, "args": grouped}))
