"""Losses on tokens beyond the next one."""
