"""Set-union knapsacks under several resources: which queries are worth their capacity. Pure.

A query has a priority and needs items, which other queries may need too and which cost capacity
once. The best set of queries is a set-union knapsack (NP-hard). This package knows neither
Kubernetes nor topologies; it needs neither NumPy nor a solver, but for `exact`.

Paper: Progressive recovery (Su and Zhou 2017), section 5.
"""
