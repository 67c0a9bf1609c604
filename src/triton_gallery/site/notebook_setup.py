"""What the first cell of a notebook does; its text stands there."""


def install_missing(*packages: str) -> None:
    """Install what is not here. Where all is, nothing happens."""
    import subprocess
    import sys
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec
    from shutil import which

    from packaging.requirements import Requirement

    missing = []
    for package in map(Requirement, packages):
        try:
            if package.specifier.contains(version(package.name), prereleases=True):
                continue
        except PackageNotFoundError:
            pass
        missing.append(str(package))
    if not missing:
        return
    if find_spec("pip"):
        install = [sys.executable, "-m", "pip", "install"]
    elif uv := which("uv"):  # an environment of uv has no pip
        install = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise ModuleNotFoundError(f"here is neither pip nor uv: install {', '.join(missing)}")
    subprocess.run([*install, "--quiet", *missing], check=True)
