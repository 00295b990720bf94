"""Arguments of public classes: declared in the signature, checked in one place."""
