"""Which parameters get which optimizer and which rate, and how an optimizer is made from its class path."""
