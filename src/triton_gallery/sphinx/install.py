"""What the first cell of a notebook does; its text stands there."""


def install_missing(*packages: str) -> None:
    """Install what is not here. Where all is, nothing happens."""
    import subprocess
    import sys
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    missing = []
    for package in map(Requirement, packages):
        try:
            if package.specifier.contains(version(package.name), prereleases=True):
                continue
        except PackageNotFoundError:
            pass
        missing.append(str(package))
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
