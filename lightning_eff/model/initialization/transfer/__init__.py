"""Settings found on a narrow model, carried over to a wide one."""
