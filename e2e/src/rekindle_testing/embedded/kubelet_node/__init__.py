"""Kubelet nodes: Kubernetes nodes with a real kubelet, containerd and kube-proxy.

`node.KubeletNode` is a node and `network.NodeNetwork` is what connects the nodes of a cluster;
everything else serves them. Each node is a set of namespaces with an init of its own (`init`), so
that the kernel ends all of it with one process. What remains (cgroups, directories, a link) is in
a state file before it exists, and `removal` removes what the file lists.
See docs/kubelet-nodes.md.
"""
