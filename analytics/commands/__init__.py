"""Commands of the jobs: options, checks of them and messages. A job is imported when its command is called."""
