"""Token dispatchers that send each token once: per destination rank (`dedup`) or per node, then per rank
(`twohop`).

Layers, each testable alone: routing arithmetic (`layout`, `routing`, `counts`, `wire`, `formula`), row
kernels (`rows`, `kernels`), collectives (`transport`), dispatch and combine (`engine`), gradients
(`autograd`), Megatron (`megatron`).
"""
