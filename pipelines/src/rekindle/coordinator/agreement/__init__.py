"""Whether replicas computed the same, and what is held back while they did not.

Pure: must not know routes, polls or the store; it says which replica is not trusted, which one
computes again, and through which epoch results are agreed on.
"""
