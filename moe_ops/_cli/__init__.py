"""The command line: `python -m moe_ops info | check | bench | demo`."""
