"""`megatron-moe` as a tree without checkpoint/local-moe-norm-name has it: no flag in the content metadata.

Layers then take the old names, in the optimizer's state too.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ext.cli import main
from megatron_ext.runtime import cpu
from megatron_ext.upcycle.offline import OWN_NORM_NAME


def drop_the_flag() -> None:
    from megatron.training import checkpointing

    real = checkpointing._build_sharded_state_dict_metadata

    def without_flag(*words: Any, **more: Any) -> dict[str, Any]:
        return {name: value for name, value in real(*words, **more).items() if name != OWN_NORM_NAME}

    checkpointing._build_sharded_state_dict_metadata = without_flag


if __name__ == "__main__":
    cpu.install()  # before anything imports Megatron
    drop_the_flag()
    sys.exit(main(sys.argv[1:]))
