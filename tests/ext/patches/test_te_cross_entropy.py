"""Proof of te-cross-entropy: from Transformer Engine 2.20 on the loss may take the logits' place.

Transformer Engine needs a GPU; here its loss is a stand-in that records the call. tests/gpu compares the real one.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest
import source
import torch


def _wrapper(version_is_enough: bool) -> tuple[Any, list[dict[str, Any]]]:
    made = source.function("megatron.core.extensions.transformer_engine", "te_parallel_cross_entropy")
    made.returns = None
    calls: list[dict[str, Any]] = []

    def loss(*args: Any, **options: Any) -> str:
        calls.append(options)
        return "loss"

    names: dict[str, Any] = {
        "torch": torch,
        "parallel_cross_entropy": loss,
        "is_te_min_version": lambda version: version_is_enough,
        "_TE_SUPPORTS_CG_CAPTURABLE": True,
    }
    exec(compile(ast.Module([made], []), "te", "exec"), names)
    return names["te_parallel_cross_entropy"], calls


def test_logits_may_be_overwritten_from_te_2_20() -> None:
    wrapper, calls = _wrapper(version_is_enough=True)
    assert wrapper(torch.zeros(2, 1, 4), torch.zeros(2, 1), None) == "loss"
    wrapper(torch.zeros(4, 1, 2).transpose(0, 2), torch.zeros(2, 1), None)
    assert [call["overwrite_input"] for call in calls] == [True, False]


@pytest.mark.parametrize("enough", [True, False])
def test_older_versions_are_still_refused(enough: bool) -> None:
    text = source.source_of("megatron.training.arguments")
    tree = ast.parse(text)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Assert) and "stability" in ast.unparse(n)]
    assert len(found) == 1
    given = {"args": type("Args", (), {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"})}
    check = compile(ast.Expression(found[0].test), "arguments", "eval")
    assert eval(check, {**given, "is_te_min_version": lambda version: enough}) is enough
