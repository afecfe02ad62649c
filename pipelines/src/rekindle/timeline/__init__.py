"""What happened to a topology: its history, read from samples or Events, and the picture of it."""
