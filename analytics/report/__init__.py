"""The report: one HTML page with plots, made of the rollups, readable without a network."""
