"""``elasticd doctor``: whether this machine or pod can run a job, and what is wrong if not.

``command`` has facts gathered (``etcd_facts``, ``machine_facts``, ``torch_facts``, ``import_facts``), each
a frozen dataclass, has them judged (``judge``, pure), and shows the findings.
"""
