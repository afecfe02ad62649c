"""The history of a topology, read from status samples or Events, and its drawing."""
