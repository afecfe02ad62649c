"""Process nodes: Kubernetes nodes whose containers are local processes.

`node.ProcessNode` is the entry point; everything else runs inside the node.  See
docs/process-nodes.md for what a node does, and for what it refuses to do.
Empty on purpose: the launcher, the init and the shims import this package and must use
little memory.
"""
