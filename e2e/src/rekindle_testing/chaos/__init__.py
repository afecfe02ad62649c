"""`make chaos`: `plan` draws faults from a seed, `injector` injects them, `run` checks the results.

Design: docs/chaos.md.
"""
