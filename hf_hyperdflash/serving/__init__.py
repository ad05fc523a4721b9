"""Our drafters in serving engines: what runs them there, and nothing that runs without one."""
