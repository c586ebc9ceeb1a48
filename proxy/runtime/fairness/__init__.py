"""Bounds shared fairly between principals and addresses: queues, capacity, budgets in bytes."""
