"""The operator's decisions: pure functions from what is to what to do; `core` joins them."""
