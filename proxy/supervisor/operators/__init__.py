"""What operators and the admin worker can ask the supervisor."""
