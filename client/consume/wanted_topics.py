"""The topics that a consumer reads: one, several, or all whose names match a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_topic_name
from raymq.store.groups.members import TOPICS_MAX, TopicSubscription, matches

#: of topic names, and `*`
_PATTERN = re.compile(r"[%|a-zA-Z0-9_*-]{1,255}")


class TopicPattern(NamedTuple):
    """What `matching` returns."""

    pattern: str


#: a topic, several, or those of a pattern
TopicChoice: TypeAlias = str | Sequence[str] | TopicPattern


def matching(pattern: str) -> TopicPattern:
    """All topics whose names match a pattern, for `Cluster.consumer`. Topics that are made later are among them.

    Example:
        ```python
        import raymq

        with raymq.connect() as cluster:
            cluster.create_topic("orders-eu", queues=2)
            cluster.create_topic("orders-us", queues=2)
            with cluster.consumer(raymq.matching("orders-*"), group="billing", start="earliest") as consumer:
                print(sorted(consumer.assignment()))
        ```

    Args:
        pattern: letters, digits and %|_- as in a topic's name, and `*` for any text, also none. Topics for messages
            that were sent back, %RETRY% and %DLQ%, match only a pattern that begins with `%`. The first 1,000 topics
            by name count.

    Raises: Rejected for another pattern.
    """
    if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
        raise Rejected(
            f"the pattern {pattern!r} may have letters, digits, %|_- and *, and 1 to 255 of them: topic names have no "
            "others",
            field="pattern",
            limit="letters, digits, %|_-*",
            found=pattern,
        )
    return TopicPattern(pattern)


class WantedTopics:
    """The topics of one consumer. `str(wanted)` names them for people."""

    def __init__(self, topics: TopicChoice) -> None:
        """Raises: Rejected for wrong names, none, or too many."""
        #: the one topic; None: there may be several, and queues are named with their topics
        self.single: str | None = topics if isinstance(topics, str) else None
        #: empty: there are names
        self.pattern = topics.pattern if isinstance(topics, TopicPattern) else ""
        #: ascending, without repetition; empty with a pattern
        self.names: tuple[str, ...] = ()
        if isinstance(topics, str):
            self.names = (topics,)
        elif not isinstance(topics, TopicPattern):
            self.names = _checked_names(topics)

    def __str__(self) -> str:
        return self.pattern or ", ".join(self.names)

    def subscription(self) -> TopicSubscription:
        """For a group's coordinator."""
        return TopicSubscription(self.names, self.pattern)

    def has(self, topic: str) -> bool:
        """Whether a topic is one of them, if it exists."""
        return matches(topic, self.pattern) if self.pattern else topic in self.names


def _checked_names(topics: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(topics, (list, tuple, set, frozenset)):
        raise Rejected(
            f"the topic is {topics!r}; give its name, a list of names, or raymq.matching(pattern)",
            field="topic",
            limit="a name, a list of names, or raymq.matching(pattern)",
        )
    for name in topics:
        check_topic_name(name)
    names = tuple(sorted(set(topics)))
    if not 1 <= len(names) <= TOPICS_MAX:
        raise Rejected(
            f"the list has {len(names)} topics; a consumer may read 1 to {TOPICS_MAX}",
            field="topic",
            limit=TOPICS_MAX,
            found=len(names),
        )
    return names
