"""The kinds of windows: `registry` lists them, `kind` is their interface."""
