"""Layers of peft in any module. Files that import peft are imported only if they are used."""
