"""The lookup worker: the only one that knows brokers. Receives Envelopes, answers for the brokers, checks targets."""
