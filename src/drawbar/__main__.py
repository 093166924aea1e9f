"""`python -m drawbar`."""

from drawbar.cli import main

if __name__ == "__main__":
    main()
