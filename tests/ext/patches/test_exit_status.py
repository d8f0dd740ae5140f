"""Proof of exit-status: a job that could not load its checkpoint ends with an error, so schedulers see it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import checkpointing
from source import source_of

pytestmark = pytest.mark.usefixtures("world")

ARGS: dict[str, Any] = {
    "non_persistent_global_ckpt_dir": None,
    "non_persistent_ckpt_type": None,
    "exit_on_missing_checkpoint": True,
}


def test_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        checkpointing._load_base_checkpoint(str(tmp_path), SimpleNamespace(**ARGS))
    assert ended.value.code == 1


def test_torn_tracker_file_is_an_error(tmp_path: Path) -> None:
    # What a node that dies while it writes leaves behind.
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    with pytest.raises(SystemExit) as ended:
        checkpointing.read_metadata(str(tracker))
    assert ended.value.code == 1


def test_no_failure_in_checkpointing_ends_with_success() -> None:
    calls = [node for node in ast.walk(ast.parse(source_of(checkpointing.__name__))) if isinstance(node, ast.Call)]
    exits = [call for call in calls if ast.unparse(call.func) == "sys.exit"]
    assert len(exits) == 7
    assert [call.lineno for call in exits if not call.args] == []
