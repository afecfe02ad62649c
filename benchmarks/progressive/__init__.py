"""Repeats experiments of Progressive recovery (Su and Zhou 2017), section 6: `make bench-recovery`.

`experiment` has the queries of Fig. 4 and the arrivals of Fig. 3, `policies` who starts what when a
node has arrived, `timing` when a query answers then, `tables` and `plots` what is shown.
"""
