"""Which experts a run gets, and that no optimizer state is read into the wrong ones; checkpoints are Megatron's own."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_ext.errors import UserError
from megatron_ext.experts import switch
from megatron_ext.runtime import notes

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on a GPU that has chosen nothing yet."""
    monkeypatch.setattr(switch.cpu, "is_installed", lambda: False)
    monkeypatch.setattr(switch, "_chosen", None)
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.delenv(switch.VARIABLE, raising=False)


def _args(**values: Any) -> Namespace:
    stock: dict[str, Any] = {
        "moe_ext_experts": "auto", "num_experts": 8, "transformer_impl": "local", "moe_grouped_gemm": False,
        "fp8": None, "add_bias_linear": False, "moe_apply_probs_on_input": False, "use_distributed_optimizer": True,
        "moe_use_upcycling": False, "no_load_optim": None, "finetune": False, "load": None, "save": None,
        "expert_model_parallel_size": 2,
    }  # fmt: skip
    return Namespace(**{**stock, **values})


def _saved(folder: Path, *, by_place: bool = True, **values: Any) -> str:
    """Save a checkpoint's outline: its arguments, a weight and a piece of optimizer state."""
    args = _args(**values)
    name = "gbuf_idx_0.dtype_torch.bfloat16.bucket_idx_0.exp_avg" if by_place else "exp_avg.embedding.weight"
    keys = ("embedding.weight", f"optimizer.distributed.dp_group_idx_0.{name}")
    state: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, torch.ones(4)) for key in keys}
    target = folder / "iter_0000003"
    target.mkdir(parents=True)
    dist_checkpointing.save({"args": args, "iteration": 3, **state}, str(target))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return str(folder)


@pytest.mark.parametrize(
    ("values", "experts"),
    [
        ({}, "torch"),
        ({"moe_ext_experts": "megatron"}, "megatron"),
        ({"transformer_impl": "transformer_engine"}, "megatron"),
        ({"transformer_impl": "transformer_engine", "moe_ext_experts": "torch"}, "torch"),
        ({"num_experts": None}, "megatron"),
        ({"add_bias_linear": True}, "megatron"),
    ],
    ids=["local", "taken back", "te", "te, asked for", "dense", "biases"],
)
def test_which_experts_a_run_gets(values: dict[str, Any], experts: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = _args(**values)
    switch.configure(args)
    assert args.moe_ext_experts == experts
    upstream = partial(dict)
    assert (switch.builder(upstream) is upstream) == (experts == "megatron")
    said = capsys.readouterr().out
    assert ("grouped products" in said) == (experts == "torch")
    assert ("biases" in said) == (values.get("add_bias_linear", False))


def test_what_was_asked_for_and_cannot_be_had_stops_the_start() -> None:
    with pytest.raises(UserError, match="cannot run this") as caught:
        switch.configure(_args(moe_ext_experts="torch", fp8="hybrid"))
    assert "FP8" in str(caught.value)


def test_a_stock_entry_script_asks_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = partial(dict)
    assert switch.builder(upstream) is upstream
    monkeypatch.setenv(switch.VARIABLE, "torch")
    assert switch.builder(upstream) is not upstream
    args = _args(moe_ext_experts=None)
    switch.settle(args)
    assert args.moe_ext_experts == "torch"


LOCAL: dict[str, Any] = {"moe_ext_experts": "megatron"}
TE: dict[str, Any] = {"moe_ext_experts": "megatron", "transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
TORCH: dict[str, Any] = {"moe_ext_experts": "torch"}


@pytest.mark.parametrize("on_cpu", [False, True])
def test_auto_goes_on_with_the_experts_that_the_optimizer_state_is_for(
    on_cpu: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch.cpu, "is_installed", lambda: on_cpu)
    args = _args()
    switch.configure(args)
    assert args.moe_ext_experts == ("megatron" if on_cpu else "torch")
    args = _args(load=_saved(tmp_path / "theirs", **LOCAL))
    switch.configure(args)
    assert args.moe_ext_experts == "megatron"
    assert ("in their order" in capsys.readouterr().out) == (not on_cpu)
    args = _args(load=_saved(tmp_path / "ours", **TORCH))
    switch.configure(args)
    assert args.moe_ext_experts == "torch"


def test_a_checkpoint_from_before_the_choice_is_megatrons(tmp_path: Path) -> None:
    folder = _saved(tmp_path, moe_ext_experts=None)
    args = _args(load=folder)
    switch.configure(args)
    assert args.moe_ext_experts == "megatron"


@pytest.mark.parametrize(
    ("theirs", "asked"),
    [(LOCAL, TORCH), (TORCH, LOCAL), (TE, TORCH), (TE, LOCAL), (LOCAL, TE), (TORCH, TE)],
    ids=["torch on local", "local on torch", "torch on te", "local on te", "te on local", "te on torch"],
)
def test_optimizer_state_of_other_experts_is_refused(
    theirs: dict[str, Any], asked: dict[str, Any], tmp_path: Path
) -> None:
    folder = _saved(tmp_path / "by place", **theirs)
    with pytest.raises(UserError) as caught:
        switch.configure(_args(load=folder, **asked))
    assert "--dist-ckpt-optim-fully-reshardable" in str(caught.value)
    # What has names, or is not read, may come from anywhere.
    named = _saved(tmp_path / "named", by_place=False, **theirs)
    for values in (
        {"load": named},
        {"load": folder, "no_load_optim": True},
        {"load": folder, "finetune": True},
        {"load": folder, "use_distributed_optimizer": False},
        {"load": folder, "moe_use_upcycling": True},
        {"load": folder, "expert_model_parallel_size": 8},
        {"load": _saved(tmp_path / "dense", num_experts=None)},
    ):
        switch.configure(_args(**{**asked, **values}))


def test_a_requeued_upcycling_run_is_checked_against_its_own_checkpoint(tmp_path: Path) -> None:
    saved = _saved(tmp_path, **LOCAL)
    with pytest.raises(UserError):
        switch.configure(_args(moe_use_upcycling=True, save=saved, load="dense", **TORCH))
