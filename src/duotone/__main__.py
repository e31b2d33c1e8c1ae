"""`python -m duotone` is `duotone`."""

from duotone.cli.main import main

if __name__ == "__main__":
    main()
