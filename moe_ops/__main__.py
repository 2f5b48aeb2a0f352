"""`python -m moe_ops`."""

from moe_ops._cli.app import main

if __name__ == "__main__":
    main()
