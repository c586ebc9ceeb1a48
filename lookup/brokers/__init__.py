"""The brokers of ``brokers.service_url``: discovery, health, ejection and credential checks."""
