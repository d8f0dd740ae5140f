"""Estimates from arithmetic alone: no devices, no processes. `dispatch`: what a token dispatcher moves, and how
long. `upcycle`: when a run from scratch catches up, and the size of the result."""
