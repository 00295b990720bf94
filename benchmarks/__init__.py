"""The bench's reference tasks, their recipes, and scripts that measure what a technique costs."""
