"""User-facing layer: command line, launching, answers and files."""
