"""``python -m coset``: the command line, where scripts are not on the path."""

from coset.cli import main

if __name__ == "__main__":
    main()
