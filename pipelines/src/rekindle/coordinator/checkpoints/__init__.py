"""What a global checkpoint contains, when it is committed, and what streams have to keep for it.

Pure: must not know the store (an effect writes a manifest, an event is the result), the digests of
replicas that disagree, or how tasks are polled.
"""
