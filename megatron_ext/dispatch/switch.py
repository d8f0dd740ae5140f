"""Which of two equal paths runs: Triton kernels on a GPU, plain torch elsewhere.

`MOE_EXT_DISPATCH_KERNELS=torch` switches the kernels off, `interpret` takes them on any device: for tests, with
`TRITON_INTERPRET=1`, where there is no GPU.
"""

from __future__ import annotations

import os

from torch import Tensor

KERNELS_VARIABLE = "MOE_EXT_DISPATCH_KERNELS"


def use_kernels(tensor: Tensor) -> bool:
    """Whether work on this tensor goes to a Triton kernel."""
    chosen = os.environ.get(KERNELS_VARIABLE, "triton")
    return chosen == "interpret" or (tensor.is_cuda and chosen != "torch")
