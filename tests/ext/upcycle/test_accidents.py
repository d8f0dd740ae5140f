"""Wrong inputs are refused before anything is written, and a killed conversion never loads as complete."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
from gpt import Layout, Moe, Shape, build, moe_flags, save_dense, use_groups, write_and_die

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.upcycle import offline, safe_pickle, target
from megatron_ext.upcycle import spec as specs
from megatron_ext.upcycle.source import TRACKER, open_source

SHAPE = Shape(layers=2)


@pytest.fixture(scope="module")
def dense(world: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dense") / "checkpoints"
    use_groups(Layout())
    save_dense(build(SHAPE, Layout()), root, SHAPE)
    return root


def refusal(capsys: pytest.CaptureFixture[str], source: Path, made: Path, *flags: str) -> str:
    """Run the command, which must refuse and write nothing; return what it said."""
    before = sorted(made.rglob("*")) if made.exists() else None
    assert main(["upcycle", str(source), str(made), *flags]) in (1, 64)
    assert (sorted(made.rglob("*")) if made.exists() else None) == before
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "number of experts is missing"),
        (["--num-experts", "8", "--moe-ffn-hidden-size", "48"], "cannot be cut"),
        (["--num-experts", "6", "--moe-ffn-hidden-size", "16"], "whole copies"),
        (["--num-experts", "8", "--router-topk", "2", "--moe-ffn-hidden-size", "16"], "whole copies"),
        (["--num-experts", "2", "--router-topk", "4"], "more experts than there are"),
        (["--num-experts", "8", "--moe-layer-freq", "[0,1,1]"], "does not fit"),
        (["--num-experts", "8", "--moe-layer-freq", "__import__('os')"], "cannot be read"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(dense, tmp_path, capsys, flags, says):
    assert says in refusal(capsys, dense, tmp_path / "moe", *flags)


def test_no_checkpoint_and_an_existing_target_are_refused(dense, tmp_path, capsys):
    assert "no checkpoint here" in refusal(capsys, tmp_path, tmp_path / "moe", *moe_flags(Moe()))
    for wrong in (dense.parent, next(dense.glob("iter_*"))):  # the run, and one iteration
        assert f"try:   give {dense}\n" in refusal(capsys, wrong, tmp_path / "moe", *moe_flags(Moe()))
    assert main(["upcycle", str(dense), str(tmp_path / "moe"), *moe_flags(Moe())]) == 0
    assert "already holds a checkpoint" in refusal(capsys, dense, tmp_path / "moe", *moe_flags(Moe()))
    grown = refusal(capsys, tmp_path / "moe", tmp_path / "more", *moe_flags(Moe(16)), "--scaling", "none")
    assert "does not fit this source" in grown


def test_a_cut_data_file_and_a_missing_tensor_are_named(dense, tmp_path, capsys):
    broken = Path(shutil.copytree(dense, tmp_path / "broken"))
    data = next(broken.rglob("*.distcp"))
    with data.open("r+b") as handle:
        handle.truncate(data.stat().st_size // 2)
    assert "damaged" in refusal(capsys, broken, tmp_path / "moe", *moe_flags(Moe()))
    source = open_source(dense)
    lacking = {name: value for name, value in source.tensors.items() if not name.endswith("linear_fc2.weight")}
    model = specs.dense_from_args(source.args)
    with pytest.raises(UserError, match="plain one"):
        offline.plan_content(type(source)(source.root, source.folder, 12, lacking, source.objects, source.common),
                             model, specs.MoeSpec(specs.RouterRule(4, 2), 64, (True, True), names="local"))


class Bomb:
    """A stranger's object: unpickling it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_refused_by_name_and_not_run(dense, tmp_path, capsys):
    bad = Path(shutil.copytree(dense, tmp_path / "bad"))
    next(bad.rglob(".metadata")).write_bytes(pickle.dumps(Bomb(tmp_path / "made")))
    said = refusal(capsys, bad, tmp_path / "moe", *moe_flags(Moe()))
    assert "posix.mkdir" in said
    with pytest.raises(UserError, match=r"posix\.mkdir"):
        safe_pickle.load_common(target.saved_bytes(Bomb(tmp_path / "made")), tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("after", [1, 20])
def test_a_killed_conversion_never_loads_as_complete(dense, tmp_path, capsys, after):
    made = tmp_path / "moe"
    child = os.fork()
    if child == 0:
        _convert_and_die(dense, made, after)
    assert os.waitpid(child, 0)[1] != 0
    assert not (made / TRACKER).exists()
    assert not (made / "release").exists()
    with pytest.raises(UserError, match="no checkpoint here"):
        open_source(made)
    # The next try clears what was left and succeeds.
    assert main(["upcycle", str(dense), str(made), *moe_flags(Moe())]) == 0
    assert sorted(path.name for path in made.iterdir()) == [TRACKER, "release"]


def _convert_and_die(dense: Path, made: Path, after: int) -> None:
    source = open_source(dense)
    wish = specs.MoeSpec(specs.RouterRule(8, 2), 64, (True, True), names="local")
    content = offline.plan_content(source, specs.dense_from_args(source.args), wish)
    write_and_die(made, content, after)


def test_data_goes_on_unless_asked(dense, tmp_path):
    assert main(["upcycle", str(dense), str(tmp_path / "on"), *moe_flags(Moe())]) == 0
    assert main(["upcycle", str(dense), str(tmp_path / "again"), *moe_flags(Moe()), "--restart-data"]) == 0
    assert open_source(tmp_path / "on").args.consumed_train_samples == 48
    assert open_source(tmp_path / "again").args.consumed_train_samples == 0
    assert main(["upcycle", str(dense), str(tmp_path / "carry"), *moe_flags(Moe()), "--carry-schedule"]) == 0
    carried = open_source(tmp_path / "carry")
    assert carried.iteration == 12
    assert carried.common["opt_param_scheduler"]["num_steps"] == 48


def test_a_moe_for_either_kind_of_layers_has_the_same_names(dense, tmp_path):
    for kind in ("local", "transformer_engine"):
        assert main(["upcycle", str(dense), str(tmp_path / kind), *moe_flags(Moe()), "--transformer-impl", kind]) == 0
    local, other = open_source(tmp_path / "local"), open_source(tmp_path / "transformer_engine")
    assert set(local.tensors) == set(other.tensors)
    assert "decoder.layers.pre_mlp_layernorm.weight" in local.tensors
    # Transformer Engine's norms keep something besides weights, and Megatron does not load an MoE that lacks it.
    states = {f"decoder.layers.pre_mlp_layernorm._extra_state/shard_{layer}_2" for layer in range(2)}
    assert set(other.objects) - set(local.objects) == states
    # Megatron reads under these names where this says so (patch checkpoint/local-moe-norm-name).
    assert local.common["content_metadata"][offline.OWN_NORM_NAME]
