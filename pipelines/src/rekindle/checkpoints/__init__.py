"""Global checkpoints: the store, the states of partitions in it, and the manifests over them."""

from rekindle.checkpoints.manifest import Entry, Manifest
from rekindle.checkpoints.manifests import ManifestStore
from rekindle.checkpoints.state import StateStore, merge_entries
from rekindle.checkpoints.store import Store
from rekindle.errors import ObjectMissing

__all__ = [
    "Entry",
    "Manifest",
    "ManifestStore",
    "ObjectMissing",
    "StateStore",
    "Store",
    "merge_entries",
]
