"""Proof of upcycle-load-keyword: the upcycling block passes what the loader takes."""

from __future__ import annotations

import ast

from source import function

TRAINING = "megatron.training.training"


def test_upcycling_passes_only_parameters_that_load_checkpoint_has() -> None:
    (call,) = [
        node
        for node in ast.walk(function(TRAINING, "setup_model_and_optimizer"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load_and_upcycle_model")
    ]
    (passed,) = [keyword.value for keyword in call.keywords if keyword.arg == "load_kwargs"]
    assert isinstance(passed, ast.Dict)
    names = {key.value for key in passed.keys if isinstance(key, ast.Constant)}
    loader = function("megatron.training.checkpointing", "load_checkpoint")
    parameters = {argument.arg for argument in (*loader.args.args, *loader.args.kwonlyargs)}
    assert names
    assert names <= parameters
