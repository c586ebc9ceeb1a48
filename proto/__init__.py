"""What travels on wires: decides from bytes and state alone, without IO, clocks or Trio."""
