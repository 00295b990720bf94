"""Shares results of one pipeline rank with all ranks."""
