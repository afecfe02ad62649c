"""DPC's experiments (Balazinska et al. 2005, section 5) on the embedded cluster; see `__main__`."""
