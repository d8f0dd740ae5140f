"""Estimates from arithmetic alone: no devices, no processes. `dispatch`: what a token dispatcher moves, and how
long. `memory`: the peak of a training command on a GPU. `upcycle`: when a run from scratch catches up, and the size of
the result."""
