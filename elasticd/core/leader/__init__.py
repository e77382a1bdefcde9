"""The leader of a job: from the facts in etcd to the next transaction.

The leader is level-triggered: each event updates the view, then ``decide`` looks at the whole view. So a new
leader needs only the view, and failover is not a special case. Every plan is one guarded transaction; the
driver adds the guard that this agent still leads.

    waiting --enough workers--> live --broken, drained, resized--> closing --all released--+
       ^                         |                                                         |
       |                         +--all finished--> ended <--budget spent, stopped---------+
       +--too few workers------------------------------------------------------------------+
                                            (else the next round is live at once)

A live round that all members have released closes in the same transaction in which the next round begins.
"""

from elasticd.core.leader.deciding import decide, decide_and_go_on
from elasticd.core.leader.plan import Plan
from elasticd.core.leader.roll import Mark, Registered, Standing
from elasticd.core.leader.view import FINDINGS, NOT_SEATED, View, entries_of, foresee, hear_paces, see

__all__ = [
    "FINDINGS",
    "NOT_SEATED",
    "Mark",
    "Plan",
    "Registered",
    "Standing",
    "View",
    "decide",
    "decide_and_go_on",
    "entries_of",
    "foresee",
    "hear_paces",
    "see",
]
