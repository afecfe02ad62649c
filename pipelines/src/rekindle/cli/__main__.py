"""`python -m rekindle.cli`."""

from rekindle.cli import main_process

main_process()
