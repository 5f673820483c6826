"""`python -m cptrace`."""

from cptrace.cli.process import run

if __name__ == "__main__":
    run()
