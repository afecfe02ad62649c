"""Kubelet nodes: Kubernetes nodes with a real kubelet, containerd and kube-proxy.

`node.KubeletNode` is a node and `network.NodeNetwork` is what connects the nodes of a cluster;
everything else serves them. Each node is a set of namespaces with an init of its own (`init`), so
that the kernel ends all its processes with that one. Its cgroups, directories and network link
outlive them: these are written to a state file before they are made, and `removal` removes what
the file lists. See docs/kubelet-nodes.md.
"""
