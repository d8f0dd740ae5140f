"""Kernels and products for what a profile showed to be slow and no library has. Patches under patches/gpu call them."""
