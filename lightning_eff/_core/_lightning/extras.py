"""The command that installs an optional dependency."""


def install(extra: str) -> str:
    """Return the command that installs an extra of this package, in the root of a clone."""
    return f"pip install -c constraints.txt '.[{extra}]'"


def missing(who: str, package: str, extra: str) -> str:
    """Return the message for a package that is not installed.

    Args:
        who: the class or command that needs it.
        package: its name.
        extra: the extra that contains it.
    """
    return f"{who}: the package {package} is not installed. In a clone of lightning_eff, run: {install(extra)}"
