"""Many ranks over gloo: Megatron is imported once, here, and each test forks its ranks from this process."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from megatron_ext.runtime import cpu

if not torch.cuda.is_available():
    torch.set_num_threads(1)
    cpu.install()
