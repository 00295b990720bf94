"""The bases of techniques that replace attention in unchanged modules."""
