"""The report: one HTML page with the bill of a period and its main figures, readable without a network."""
