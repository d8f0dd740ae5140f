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
