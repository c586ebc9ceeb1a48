"""Clients' requests of lookup mode: admitted, scheduled, executed and answered."""
