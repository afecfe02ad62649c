"""The language of a generator's columns."""
