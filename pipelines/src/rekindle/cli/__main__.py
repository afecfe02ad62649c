"""`python -m rekindle.cli`."""

import sys

from rekindle.cli import main

sys.exit(main())
