"""Published tables of measurements: our own format, and one reader for each family of tables."""
