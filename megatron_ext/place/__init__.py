"""Number a checkpoint's experts anew, so that every expert-parallel rank gets about as many tokens.

An MoE layer does not care which expert has which number, but Megatron lays experts over ranks in blocks of
consecutive numbers, and every layer waits for the rank whose experts got most. `balance` chooses the numbers from the
counts that a run recorded, `renumber` makes the checkpoint, `cli` is the verb.
"""
