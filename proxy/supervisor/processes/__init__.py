"""Worker processes from the supervisor's side: spawning, configuring, waiting, ending."""
