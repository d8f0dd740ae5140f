"""Proof of upcycle-requeue: a job that starts again with --moe-use-upcycling goes on from its own checkpoint."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "upcycle"))
from gpt import Layout, Moe, Shape, build, moe_flags, save_dense, use_groups
from source import function

from megatron_ext.cli import main


@pytest.fixture
def upcycled(world: None, tmp_path: Path) -> Path:
    shape = Shape(layers=2)
    use_groups(Layout())
    save_dense(build(shape, Layout()), tmp_path / "dense", shape)
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), *moe_flags(Moe(4))]) == 0
    return tmp_path


def validated(root: Path, monkeypatch: pytest.MonkeyPatch, **more: str):
    from megatron.training.arguments import parse_args, validate_args

    flags = {"--num-layers": "2", "--hidden-size": "32", "--ffn-hidden-size": "64", "--num-attention-heads": "4",
             "--seq-length": "16", "--max-position-embeddings": "16", "--micro-batch-size": "1", "--num-experts": "4",
             "--lr": "1e-3", "--train-iters": "2", "--load": str(root / "dense"), "--save": str(root / "moe"),
             "--transformer-impl": "local", "--save-interval": "1", "--eval-iters": "0", **more}  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    switches = ["--moe-use-upcycling", "--no-persist-layer-norm", "--no-rope-fusion", "--mock-data"]
    monkeypatch.setattr(sys, "argv", ["train", *words, *switches, "--no-gradient-accumulation-fusion"])
    args = parse_args()
    validate_args(args)
    return args


def test_a_second_start_goes_on(upcycled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = validated(upcycled, monkeypatch)
    assert not args.moe_use_upcycling
    assert args.load == str(upcycled / "moe")
    assert not args.no_load_optim
    assert not args.no_load_rng


def test_the_upcycled_model_is_saved_as_a_release() -> None:
    # Reached behind a whole upcycling; tests/e2e/test_upcycle_in_training.py goes there and on.
    setup = function("megatron.training.training", "setup_model_and_optimizer")
    saves = [n for n in ast.walk(setup) if isinstance(n, ast.Call) and ast.unparse(n.func) == "save_checkpoint"]
    upcycled = [call for call in saves if "release=True" in ast.unparse(call)]
    assert len(upcycled) == 1
