"""`python -m cptrace`."""

from cptrace.cli.main import main

if __name__ == "__main__":
    main()
