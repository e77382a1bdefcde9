"""``elasticd doctor``: whether this machine or pod can run a job, and what is wrong if not.

``command`` collects facts (``machine_facts``, ``worker_facts``, and ``elasticd.etcd.examine``), each a frozen
dataclass, has them judged (``judge``, pure), and shows the findings.
"""
