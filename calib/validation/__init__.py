"""How right the models are on a table of measurements: protocols and scores."""
