"""The few ways in which a technique may touch training; nothing here knows any technique."""
