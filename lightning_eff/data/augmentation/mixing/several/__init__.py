"""Samples made of several, whose masks are looked for: by the network's own gradients, or by a teacher's."""
