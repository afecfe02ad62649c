"""Bad records in a topic, on a real broker: as they were, each once, whoever finds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kafka_parts import Topic, new_topic, open_kafka, spec_of
from kafka_sink_parts import committed

from rekindle.connectors.dead_letters import DeadLetter
from rekindle.connectors.kafka_dead_letters import DeadLetterTopic
from rekindle.errors import SourceFailed
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process


def letters_of(topic: Topic, dead: Topic, operator_id: str = "op") -> DeadLetterTopic:
    spec = spec_of(topic, onBadRecord="DeadLetter", deadLetterTopic=dead.name)
    assert spec.kafka is not None
    return DeadLetterTopic(spec.kafka, "clicks", operator_id, 0, "uid")


def put(letters: DeadLetterTopic, first: int, *found: DeadLetter) -> None:
    """Again as long as it is refused, as a source does: another replica may be faster."""

    def once() -> bool:
        try:
            letters.put(first, found)
        except SourceFailed:
            return False
        return True

    eventually(once, 30)


def letter(offset: int) -> DeadLetter:
    return DeadLetter("clicks", 1, offset, None, None, b"v%d" % offset, "wrong")


def values(topic: Topic) -> list[bytes]:
    return sorted(message.value() or b"" for message in committed(topic))


@pytest.fixture
def topics(kafka_broker: KafkaBroker) -> tuple[Topic, Topic]:
    return new_topic(kafka_broker), new_topic(kafka_broker, 2)


def test_a_record_is_as_it_was_and_says_where_it_was(topics: tuple[Topic, Topic]) -> None:
    topic, dead = topics
    topic.send(
        [b'{"id":"x"}', None],
        key=b"k",
        headers=[("h", b"1"), ("n", None)],
        timestamp=1_767_225_600_123,
    )
    source = open_kafka(topic, onBadRecord="DeadLetter", deadLetterTopic=dead.name)
    reach = source.ends(None)
    found = source.read(reach.start, reach.end)
    assert [bad.offset for bad in found.dead_letters] == [0]
    letters = letters_of(topic, dead)
    put(letters, 5, *found.dead_letters)
    (message,) = committed(dead)
    assert (message.key(), message.value()) == (b"k", b'{"id":"x"}')
    headers = dict(message.headers() or [])
    assert b"id" in (headers.pop("rekindle.error") or b"")
    assert headers == {
        "h": b"1",
        "n": None,
        "rekindle.topic": topic.name.encode(),
        "rekindle.partition": b"0",
        "rekindle.offset": b"0",
        "rekindle.timestampMs": b"1767225600123",
    }
    letters.close()
    source.close()


def test_replicas_and_replays_write_each_cut_once(topics: tuple[Topic, Topic]) -> None:
    first, second = (letters_of(*topics) for _ in range(2))
    put(first, 3, letter(1), letter(2))
    put(second, 3, letter(1), letter(2))
    put(second, 7, letter(3))
    put(first, 7, letter(3))
    first.close()  # and another boot, from before
    again = letters_of(*topics)
    for epoch, offsets in ((3, (1, 2)), (7, (3,)), (9, (4,))):
        put(again, epoch, *map(letter, offsets))
    assert values(topics[1]) == [b"v1", b"v2", b"v3", b"v4"]
    assert all((m.partition() or 0) == 1 for m in committed(topics[1]))  # that of the source
    again.close()
    second.close()


def test_another_definition_of_the_source_has_its_own(topics: tuple[Topic, Topic]) -> None:
    for operator_id in ("op", "other"):
        letters = letters_of(*topics, operator_id)
        put(letters, 3, letter(1))
        letters.close()
    assert values(topics[1]) == [b"v1", b"v1"]


def test_a_topic_that_is_not_there_is_named(kafka_broker: KafkaBroker) -> None:
    missing = Topic(kafka_broker, "no-such-topic")
    letters = letters_of(new_topic(kafka_broker), missing)
    with pytest.raises(SourceFailed, match="source clicks: deadLetterTopic no-such-topic at"):
        letters.put(3, [letter(1)])
    letters.close()


def test_a_record_that_is_too_large_is_named_whatever_is_beside_it(
    kafka_broker: KafkaBroker,
) -> None:
    dead = new_topic(kafka_broker, 2)
    letters = letters_of(new_topic(kafka_broker), dead)
    large = replace(letter(1), value=b"x" * 2_000_000)  # in a request of its own
    with pytest.raises(SourceFailed, match=r"too large.*raise max\.message\.bytes of the topic"):
        letters.put(3, [large, letter(2)])
    put(letters, 3, letter(2))
    assert values(dead) == [b"v2"]
    letters.close()
