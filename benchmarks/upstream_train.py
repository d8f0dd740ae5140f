"""Our entry point on unpatched Megatron, for comparisons: the call sites of the hooks are missing there.

    PYTHONPATH=UPSTREAM:. python -m torch.distributed.run ... benchmarks/upstream_train.py train -- MEGATRON FLAGS
"""

from __future__ import annotations

import sys

from megatron_ext import cli
from megatron_ext.runtime import hooks

if __name__ == "__main__":
    hooks.require_model_built = lambda: None
    sys.exit(cli.main(sys.argv[1:]))
