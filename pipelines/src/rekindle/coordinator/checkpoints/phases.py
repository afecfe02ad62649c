"""The checkpoint in flight: from reading the newest manifest to committing the next one. Pure.

One manifest is in flight at a time. Its entries were saved by the tasks before it is proposed, so
the checkpoint is complete when its manifest is written; the coordinator that is first to put its
number commits it. After a failure it is not known what was written, so the newest manifest is read
before the next proposal.

Design: docs/design/checkpoints.md#who-commits.
Paper: Progressive recovery (Su and Zhou 2017), section 4.
"""

from __future__ import annotations

from enum import StrEnum

from rekindle.transitions import StateMachine, Table


class CommitPhase(StrEnum):
    UNREAD = "unread"  # the newest manifest is not known
    READING = "reading"  # the newest manifest is being read
    READY = "ready"  # the newest manifest is known; none is in flight
    WRITING = "writing"  # the next manifest is in flight


class CommitEvent(StrEnum):
    READ_STARTED = "read started"
    READ_ENDED = "read ended"
    PROPOSED = "proposed"  # a complete checkpoint: its manifest is to be written
    COMMITTED = "committed"
    RACE_LOST = "race lost"  # abandoned: another coordinator wrote this number
    ENTRIES_REFUSED = "entries refused"  # abandoned: states are missing in the store
    STORE_FAILED = "store failed"  # abandoned, or committed: a read will show
    MANIFEST_MISSING = "manifest missing"  # but tasks have started: it is another store


TRANSITIONS: Table[CommitPhase, CommitEvent] = {
    CommitPhase.UNREAD: {
        CommitEvent.READ_STARTED: CommitPhase.READING,
    },
    CommitPhase.READING: {
        CommitEvent.READ_ENDED: CommitPhase.READY,
        CommitEvent.STORE_FAILED: CommitPhase.UNREAD,
    },
    CommitPhase.READY: {
        CommitEvent.PROPOSED: CommitPhase.WRITING,
        CommitEvent.MANIFEST_MISSING: CommitPhase.UNREAD,
    },
    CommitPhase.WRITING: {
        CommitEvent.COMMITTED: CommitPhase.READY,
        CommitEvent.RACE_LOST: CommitPhase.READING,
        CommitEvent.ENTRIES_REFUSED: CommitPhase.UNREAD,
        CommitEvent.STORE_FAILED: CommitPhase.UNREAD,
    },
}


def commit_machine() -> StateMachine[CommitPhase, CommitEvent]:
    return StateMachine("checkpoint", TRANSITIONS, CommitPhase.UNREAD)
