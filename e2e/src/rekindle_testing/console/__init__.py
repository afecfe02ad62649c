"""`make cluster`: an embedded cluster with Rekindle that keeps running and executes commands."""
