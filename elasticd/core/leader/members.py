"""Questions about the members of a round, and about candidates for the next one, answered from the view."""

from __future__ import annotations

from elasticd.core import world
from elasticd.core.facts import Drained, Member, Node, Round, Spec
from elasticd.core.leader.view import View

REPORT_S = 5.0  # a report comes within milliseconds, unless etcd is slow


def is_present(view: View, member: Member) -> bool:
    assert view.nodes is not None
    known = view.nodes.get(member.node)
    return known is not None and known.node.incarnation == member.incarnation


def is_certainly_lost(view: View, node: str, now: float) -> bool:
    """Whether an absent member has been replaced, or has been absent for too long to be merely late."""
    assert view.nodes is not None
    return node in view.nodes or now >= view.absence_counts_from


def has_released(view: View, member: Member, number: int) -> bool:
    assert view.nodes is not None
    return view.nodes[member.node].node.released >= number


def has_left(view: View, member: Member, number: int) -> bool:
    """Whether the node is present and none of its workers is in that round any more."""
    return is_present(view, member) and has_released(view, member, number)


def report_due(view: View, member: Member, now: float) -> float | None:
    """Return until when to wait for the report that belongs to a node's release.

    The two keys are watched separately. None: the report has arrived, or an older, late report must have
    replaced it.
    """
    assert view.nodes is not None
    assert view.reports is not None
    known, report = view.nodes[member.node], view.reports.get(member.node)
    node, until = known.node, known.news_at + REPORT_S
    of_that = report is not None and (report.incarnation, report.round) == (node.incarnation, node.released)
    told = report.ends if report is not None and of_that else 0
    return until if told < node.told and now < until else None


def is_fenced(view: View, member: Member, number: int) -> bool:
    assert view.nodes is not None
    return view.nodes[member.node].node.fenced >= number


def has_finished(view: View, member: Member, number: int) -> bool:
    assert view.reports is not None
    report = view.reports.get(member.node)
    return (
        report is not None
        and report.finished
        and (report.incarnation, report.round) == (member.incarnation, number)
    )


def is_leaving(view: View, spec: Spec, member: Member) -> bool:
    assert view.nodes is not None
    return view.nodes[member.node].node.draining or Drained(member.node, member.incarnation) in spec.drain


def candidates_for(view: View, spec: Spec, round: Round, *, live: bool = False) -> list[Node]:
    """Return ``world.candidates`` of the registered nodes, in order of arrival."""
    assert view.nodes is not None
    known = sorted(view.nodes.values(), key=lambda r: (r.created, r.node.name))
    return world.candidates([r.node for r in known], spec, round, live=live)
