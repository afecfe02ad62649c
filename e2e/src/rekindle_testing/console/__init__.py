"""`make cluster`: an embedded cluster with Rekindle that stays, and takes commands."""
