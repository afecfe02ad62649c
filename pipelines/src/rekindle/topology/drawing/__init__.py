"""Renders a compiled topology for users: as text, SVG or Mermaid."""
