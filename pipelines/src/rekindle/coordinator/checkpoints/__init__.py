"""What a global checkpoint contains, when it is committed, and what streams have to keep for it.

Pure: must not know the store (it asks for a manifest to be written and is told what came of it),
the digests of replicas that disagree, nor how tasks are polled.
"""
