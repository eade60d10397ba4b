"""`python -m deltasync.cli` is `deltasync`."""

from deltasync.cli import main

if __name__ == "__main__":
    main()
