"""What outlives a process: the fd store, tables of addresses, the state handed across exec."""
