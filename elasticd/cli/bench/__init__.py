"""``elasticd bench``: measures a script of the user.

``scaling_command`` has the options and shows what was found; ``scaling_runs`` runs the script and hears its
steps; ``scaling`` computes from the steps, ``scaling_advice`` advises, and ``scaling_text`` draws. The last
three are pure.
"""
