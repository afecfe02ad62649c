"""A whole topology in simulated time, driven by one seed.

Real code of all that decides (tasks, readers, sinks, the coordinator, garbage collection, the
operator) with simulated processes, disks, network, API server, nodes, checkpoint store and sinks
around it. All that is random comes from the seed: delays, the order of messages on different links,
and the faults. What a task computes is a pure function of its inputs (`values`), so every epoch
anywhere is compared with the one of a run without faults.

Design: docs/simulation.md.
Paper: FlameStream (Trofimov et al. 2019), section III: the output of a run with failures is that of
some run without.
"""
