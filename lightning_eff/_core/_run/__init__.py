"""What a session stands on: checks, current metrics, and what a checkpoint holds."""
