"""One rank of a real training with the monitor on, started by `observe_training.py` as a process of its own.

What is added to `megatron-moe train`: the monitor writes into a plain file sink, and a plugin may look at or break the
model. Usage: python observe_child.py SPEC.json
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


class FileSink:
    """The Protocol of `observe.sink` with one JSON file a kind, written as it comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: dict[str, tuple[int, float]] = {}

    def scalars(self, step, values):
        self._add("metrics", {"step": step, "metrics": dict(values)})

    def routing(self, step, layers, tokens_per_expert, extra=None):
        assert tokens_per_expert.dtype == np.int64
        line = {"step": step, "layers": list(layers), "tokens_per_expert": tokens_per_expert.tolist(), **(extra or {})}
        self._add("routing", line)

    def alarm(self, record):
        self._add("alarms", dict(record))

    def save_state(self, state):
        (self.folder / "state.json").write_text(json.dumps(state))

    def load_state(self):
        path = self.folder / "state.json"
        return json.loads(path.read_text()) if path.exists() else None

    def earlier_alarms(self):
        return []

    def last(self, key):
        return self._last.get(key)

    def note(self, tag: str, step: int, value: Any) -> None:
        """Take a scalar of Megatron's, as the tee does."""
        self._last[tag] = step, float(value)

    def _add(self, name: str, line: dict[str, Any]) -> None:
        with open(self.folder / f"{name}.jsonl", "a") as out:
            out.write(json.dumps(line) + "\n")


def train_rank(spec: dict[str, Any]) -> None:
    """Train this process's rank as the specification says (`observe_training.train` writes it)."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    sink = FileSink(Path(spec["folder"])) if rank == world - 1 else None
    plugins = importlib.import_module("observe_plugins")
    plugin = getattr(plugins, spec["plugin"])(spec, sink) if spec["plugin"] else None

    from megatron_ext.runtime import hooks, pretrain

    monitors: list[Any] = []

    def model_built(model, args):
        from megatron_ext import observe

        hooks._session.model_built = True
        if plugin is not None:
            plugin.model_built(model, args)
        monitor = observe.Monitor.from_args(args, sink)
        if monitor is not None:
            monitors.append(monitor)
            monitor.attach(model)
        hooks._session.monitor = monitor

    hooks.model_built = model_built
    stock_step_end = hooks.step_end

    def step_end(iteration):
        stock_step_end(iteration)
        if plugin is not None:
            plugin.step_end(iteration)

    hooks.step_end = step_end
    _connect(pretrain, sink)
    pretrain.train(spec["flags"], asked_device="cpu")
    for monitor in monitors:
        monitor.flush()


def main() -> None:
    train_rank(json.loads(Path(sys.argv[1]).read_text()))


def _connect(pretrain: Any, sink: FileSink | None) -> None:
    """Show the sink Megatron's loss, as the tee does."""
    stock = pretrain._pretrain

    def run(args):
        from megatron.training import training

        inner = training.training_log

        def log_and_note(loss_dict, total, rate, iteration, *a, **k):
            if sink is not None:
                for key, value in loss_dict.items():
                    sink.note(key, iteration, value)
            return inner(loss_dict, total, rate, iteration, *a, **k)

        training.training_log = log_and_note
        stock(args)

    pretrain._pretrain = run


if __name__ == "__main__":
    main()
