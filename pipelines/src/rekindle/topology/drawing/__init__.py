"""A compiled topology for people: as text, SVG or Mermaid."""
