"""Where this checkout lies: its chart, CRD, examples, and `build` for what runs leave."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
