"""A sharded module as torch's private names show it. Clients read these names; each name reads the runtime and acts
through the runtime's own operations. Loaded only when somebody asks."""
