"""Training under patched Megatron: the device, the entry point, the hooks."""
