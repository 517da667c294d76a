"""Shows a sharded module under torch's private names, which some clients read. Each name reads the runtime and acts
through the runtime's own operations. Loaded on demand, or with
FSDP1's class."""
