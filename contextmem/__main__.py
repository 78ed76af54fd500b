"""`python -m contextmem`: the command line; also for `accelerate launch -m contextmem train eraser ...`."""

from contextmem.cli import app

if __name__ == "__main__":
    app(prog_name="contextmem")
