"""How an optional dependency is installed: the one place that decides the command."""


def install(extra: str) -> str:
    """The command that installs an extra of this package, from a clone's root."""
    return f"pip install -c constraints.txt '.[{extra}]'"


def missing(who: str, package: str, extra: str) -> str:
    """The message for a package that is not installed.

    Args:
        who: the class or command that needs it.
        package: its name.
        extra: the extra that brings it.
    """
    return f"{who}: the package {package} is not installed. In a clone of lightning_eff, run: {install(extra)}"
