"""Code that needs peft; imported only if it is used."""
