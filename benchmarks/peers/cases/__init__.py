"""The cases, by family. Each module defines ``cases() -> list[Case]`` and is found by itself."""
