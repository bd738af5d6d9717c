"""One file per algorithm; each runs as a program: python algos/dqn.py --help."""
