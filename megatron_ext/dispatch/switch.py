"""Which of two equal paths runs: Triton kernels on a GPU, plain torch elsewhere."""

from __future__ import annotations

import os

from torch import Tensor

KERNELS_VARIABLE = "MOE_EXT_DISPATCH_KERNELS"  # "torch" switches the Triton kernels off


def use_kernels(tensor: Tensor) -> bool:
    """Whether work on this tensor goes to a Triton kernel."""
    return tensor.is_cuda and os.environ.get(KERNELS_VARIABLE, "triton") != "torch"
