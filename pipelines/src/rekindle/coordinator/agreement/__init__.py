"""Whether replicas computed the same, and what is held back if they did not.

Pure: must not know routes, the sending of polls, or the store. It decides which replicas are
untrusted, which one computes again, and up to which epoch replicas agree.
"""
