"""``elasticd doctor``: whether this machine or pod can run a job, and what is wrong if not.

``checks`` is a table of checks, one function each; ``probe`` asks the workers' Python; ``doctor_command``
shows the findings.
"""
