"""The agent of one node: its loop gives events to the core, and the core's actions to the edges."""
