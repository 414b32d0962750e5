"""The edge: what the user starts, asks and reads."""
