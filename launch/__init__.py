"""The edge: autoload, flags, command line, CPU stand-in, companion process, reports."""
