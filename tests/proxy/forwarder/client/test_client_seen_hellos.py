"""proxy.forwarder.client.seen_hellos: a ClientHello that comes again."""

from proxy.forwarder.client.seen_hellos import SEEN_MAX, SeenHellos


def test_a_hello_is_new_once() -> None:
    seen = SeenHellos()
    assert [seen.add(hello) for hello in (b"one", b"two", b"one")] == [True, True, False]


def test_the_hellos_that_are_known_are_bounded() -> None:
    seen = SeenHellos()
    for number in range(SEEN_MAX + 10):
        assert seen.add(b"%d" % number)
        assert len(seen._seen) <= SEEN_MAX
    assert not seen.add(b"10")
    assert seen.add(b"9"), "the oldest are forgotten"
