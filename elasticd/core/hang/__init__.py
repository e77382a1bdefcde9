"""Find the workers that hang. ``judging``: how long is too long, and which worker is to blame.
``standstill``, ``hang_messages``: what the agent sees of workers that stand still. ``watching``: what the
agent of a node does. The leader's part is in ``core.leader.hanging``."""
