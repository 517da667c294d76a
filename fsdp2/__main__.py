"""``python -m fsdp2``: the command line of the tools."""

from fsdp2.tools.command_line import main

if __name__ == "__main__":
    main()
