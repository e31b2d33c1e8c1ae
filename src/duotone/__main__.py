"""`python -m duotone` is `duotone`. Its packages are an extra, so that the library does not need them."""

import sys

PACKAGES = ("click", "jinja2", "mpmath", "numpy", "rich", "safetensors")


def main() -> None:
    """Run the command line, or exit with one line that names the packages it needs."""
    try:
        from duotone_lab.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        sys.exit(f"duotone: the command line needs {error.name}: pip install {' '.join(PACKAGES)}")
    run()


if __name__ == "__main__":
    main()
