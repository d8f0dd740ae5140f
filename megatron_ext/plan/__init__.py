"""Estimates from arithmetic alone: no devices, no processes. `dispatch`: what a token dispatcher moves, and how
long. `layout`: over how many ranks the experts should lie. `memory`: the peak of a training command on a GPU.
`upcycle`: when a run from scratch catches up, and the size of the result."""
