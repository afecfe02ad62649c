"""Replicas of the operator in a simulation: its real parts, on a simulated clock and network."""
