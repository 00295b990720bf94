"""Arguments of public classes: declared in the signature, and checked in one place."""
