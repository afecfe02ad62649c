"""What a global checkpoint contains, when it is committed, and what streams have to keep for it.

Pure: must not know the store (a manifest is written by an effect, its outcome is an event),
the digests of replicas that disagree, nor how tasks are polled.
"""
