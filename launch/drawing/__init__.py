"""Charts as static SVG: for the page, for Markdown, for W&B and for e-mail."""
