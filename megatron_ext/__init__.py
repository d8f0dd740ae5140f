"""What runs beside a patched Megatron: runtime, data, instruments, dispatchers and reports of this distribution."""
