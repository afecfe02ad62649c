"""The kinds of windows: `registry` has them all, `kind` says what each has to give."""
