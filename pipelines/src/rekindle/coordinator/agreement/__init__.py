"""Whether replicas computed the same, and what is held back while they did not.

Pure: must not know routes, the sending of polls, or the store. It decides which replica is not
trusted, which one computes again, and through which epoch replicas agree.
"""
