"""Proof of local-moe-norm-name: local MoE layers name their norm as Transformer Engine's do, and older ones load.

Megatron's own save_checkpoint and load_checkpoint, on one rank. What stands for an older tree is the content metadata
without the flag: the layers then take the old names, and the checkpoint is as that tree writes it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "upcycle"))
from gpt import Layout, Moe, Shape, build, use_groups

FLAG = "local_moe_norm_own_name"
# Layer 1 is dense.
SHAPE, MOE = Shape(layers=3), Moe(4, 2, 48, [1, 0, 1])
FUSED, OWN = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
# layers.L.NAME of every norm before an MLP.
NEW_NAMES = {"0." + OWN, "1." + FUSED, "2." + OWN}
OLD_NAMES = {"0." + FUSED, "1." + FUSED, "2." + FUSED}


@pytest.fixture
def args(world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import checkpointing
    from megatron.training.arguments import parse_args, validate_args

    use_groups(Layout())
    flags = {"--num-layers": "3", "--hidden-size": "32", "--ffn-hidden-size": "64", "--num-attention-heads": "4",
             "--seq-length": "16", "--max-position-embeddings": "16", "--micro-batch-size": "1", "--num-experts": "4",
             "--lr": "1e-3", "--train-iters": "2", "--load": str(tmp_path), "--save": str(tmp_path),
             "--transformer-impl": "local", "--save-interval": "1", "--eval-iters": "0"}  # fmt: skip
    words = [word for pair in flags.items() for word in pair]
    switches = ["--no-persist-layer-norm", "--no-rope-fusion", "--mock-data", "--no-gradient-accumulation-fusion"]
    switches += ["--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"]
    monkeypatch.setattr(sys, "argv", ["train", *words, *switches])
    args = parse_args()
    validate_args(args)
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)
    monkeypatch.setattr(checkpointing, "update_num_microbatches", lambda *_, **__: None)
    yield args
    destroy_rerun_state_machine()  # saving and loading make one


def model_of(value: float) -> Any:
    """Return a model whose norms before the MLPs hold a value of their own each."""
    (model,) = build(SHAPE, Layout(), MOE)
    with torch.no_grad():
        for number, layer in enumerate(model.decoder.layers):
            layer.pre_mlp_layernorm.weight.fill_(value + number)
    return model


def without_flag(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != FLAG}


def norms(model: Any) -> list[float]:
    return [layer.pre_mlp_layernorm.weight.mean().item() for layer in model.decoder.layers]


def save(model: Any) -> None:
    from megatron.training import checkpointing

    checkpointing.save_checkpoint(1, [model], None, None, 0)


def save_without_flag(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """Save norms of 2, 3, 4, while the metadata that this function of Megatron returns lacks the flag."""
    from megatron.training import checkpointing

    real = getattr(checkpointing, of)
    with monkeypatch.context() as older:
        older.setattr(checkpointing, of, lambda *args, **options: without_flag(real(*args, **options)))
        save(model_of(2.0))


def loaded() -> Any:
    """Return a model that began with other norms and has read what was saved."""
    from megatron.training import checkpointing

    model = model_of(0.0)
    assert checkpointing.load_checkpoint([model], None, None)[0] == 1
    return model


def stored(root: Path) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the norms before the MLPs, and the content metadata."""
    from megatron.core import dist_checkpointing

    folder = str(root / "iter_0000001")
    keys = dist_checkpointing.load_tensors_metadata(folder)
    content = dist_checkpointing.load_content_metadata(folder)
    return {key.removeprefix("decoder.layers.") for key in keys if key.endswith((FUSED, OWN))}, content or {}


def test_an_moe_layer_has_its_own_name_and_a_dense_one_keeps_its(args: Namespace, tmp_path: Path) -> None:
    save(model_of(2.0))
    assert stored(tmp_path)[0] == NEW_NAMES
    assert norms(loaded()) == [2.0, 3.0, 4.0]


def test_one_of_an_older_tree_loads_and_is_rewritten(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_without_flag(monkeypatch, "_build_sharded_state_dict_metadata")
    names, content = stored(tmp_path)
    assert (names, FLAG in content) == (OLD_NAMES, False)
    model = loaded()
    assert norms(model) == [2.0, 3.0, 4.0]
    args.save = str(tmp_path / "again")
    save(model)
    names, content = stored(tmp_path / "again")
    assert (names, content[FLAG]) == (NEW_NAMES, True)


def test_one_of_transformer_engine_without_the_flag_loads(
    args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its names are those that local layers have now; an older tree saves no flag with them.
    save_without_flag(monkeypatch, "_clean_metadata_for_serialization")
    names, content = stored(tmp_path)
    assert (names, FLAG in content) == (NEW_NAMES, False)
    assert norms(loaded()) == [2.0, 3.0, 4.0]
