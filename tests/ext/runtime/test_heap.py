"""After the first step, what lives as long as the run is left out of Python's full collections."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from megatron_ext.runtime import hooks

class Node:
    pass

kept = [Node() for _ in range(1000)]
hooks.step_end(1)
frozen = gc.get_freeze_count()
assert frozen > 1000, frozen
kept.extend(Node() for _ in range(1000))
hooks.step_end(2)
assert gc.get_freeze_count() <= frozen, "only the first step freezes"

ring = Node()
ring.self = ring
gone = weakref.ref(ring)
del ring
gc.collect()
assert gone() is None, "a cycle made later is still collected"
"""


def test_the_first_step_freezes_what_is_alive() -> None:
    # In a process of its own: what is frozen stays so.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EACH_STEP = """
import gc
from argparse import Namespace
import torch
from megatron_ext.runtime import heap, hooks

seen = []
gc.callbacks.append(lambda phase, info: seen.append((stage, info["generation"])) if phase == "start" else None)
heap.configure(Namespace(moe_ext_garbage="step"))
weight = torch.ones(3, requires_grad=True)

def node():
    ring = []
    ring.append(ring)
    return ring

def step(number, micro_batches=3, has_loss=True):
    global stage
    for index in range(micro_batches):
        stage = f"forward {index}"
        made = [node() for _ in range(2000)]  # in cycles: Python would collect some of them by itself
        loss = weight.sum()
        if has_loss:
            heap.loss_made(loss, micro_batches)
        stage = f"backward {index}"
        loss.backward()
        del made
    stage = "end"
    hooks.step_end(number)

stage = "start"
step(1)
assert any(when.startswith("forward") for when, _ in seen), seen
for number in (2, 3):
    seen.clear()
    step(number)
    assert seen == [("backward 2", 2)], seen  # once, fully, behind the last backward pass
seen.clear()
step(4, has_loss=False)  # another pipeline stage has the loss
assert seen == [("end", 2)], seen
seen.clear()
with torch.no_grad():
    heap.loss_made(weight.sum(), 3)  # an evaluation does not count as a micro-batch
step(5)
assert seen == [("backward 2", 2)], seen
seen.clear()
stage = "evaluation"
rings = [node() for _ in range(600_000)]
assert ("evaluation", 0) in seen, "what never ends a step is still collected"
"""


def test_garbage_is_collected_once_a_step_behind_the_last_backward_pass() -> None:
    done = subprocess.run([sys.executable, "-c", EACH_STEP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_collects_when_it_likes_without_the_flag() -> None:
    program = EACH_STEP.split('stage = "start"')[0].replace('"step"', '"python"')
    program += """
stage = "start"
step(1)
step(2)
seen.clear()
step(3)
assert any(when.startswith("forward") for when, _ in seen), seen
assert ("backward 2", 2) not in seen and ("end", 2) not in seen, seen
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
