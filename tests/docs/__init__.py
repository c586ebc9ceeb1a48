"""What README.md and docs/ show: every command, file and configuration of theirs is taken from the text and tried."""
