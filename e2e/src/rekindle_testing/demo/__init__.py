"""`make demo`: a topology loses most of its nodes, and its queries come back in order."""
