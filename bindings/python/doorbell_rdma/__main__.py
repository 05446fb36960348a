"""Runs the doorbell command in place of this process."""

import os
import sys

from doorbell_rdma import command


def main():
    program = command()
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
