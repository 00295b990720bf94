"""Techniques that fine-tune a frozen module with few trained parameters."""
