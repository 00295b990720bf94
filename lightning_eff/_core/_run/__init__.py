"""The parts of a session: checks, current metrics, loaders, and communication between processes."""
