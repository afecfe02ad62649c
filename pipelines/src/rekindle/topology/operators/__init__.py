"""The kinds of operators: `registry` lists them, `kind` is their interface."""
