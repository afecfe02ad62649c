"""The experiments of CEC (Sebepou and Magoutis 2011)."""
