"""The supervisor: starts, watches, drains and reloads the workers; owns the listeners; answers operators."""
