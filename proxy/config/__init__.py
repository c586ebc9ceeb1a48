"""The configuration: its types, how it is read, and the reference made from it."""
