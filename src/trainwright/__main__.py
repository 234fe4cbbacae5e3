"""``python -m trainwright`` is the command line."""

from trainwright.cli import main

if __name__ == "__main__":
    main()
