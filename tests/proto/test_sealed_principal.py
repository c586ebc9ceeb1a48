"""Sealed principals: without the key none can be made, changed, or made to last longer."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.rpc_pb2 import Principal, SealedPrincipal
from proto.sealed_principal import SEAL_KEY_BYTES, SealBroken, expiry_unix_ms, seal, unseal
from proto.varints import varint

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
NOW = 1_800_000_000_000
ALICE = Principal(type="User", name="alice", method="token", expires_at_unix_ms=NOW + 1000)
BOB = Principal(type="User", name="bob", method="token", expires_at_unix_ms=NOW + 1000)
FOR_EVER = Principal(type="User", name="alice", method="token")


def broken(data: bytes, key: bytes = KEY) -> str:
    with pytest.raises(SealBroken) as caught:
        unseal(data, key)
    assert caught.value.__cause__ is None
    return str(caught.value)


@pytest.mark.parametrize("principal", [ALICE, FOR_EVER, Principal()])
def test_an_unsealed_principal_is_equal_to_the_sealed_one(principal: Principal) -> None:
    assert unseal(seal(principal, KEY), KEY) == principal


@given(st.text(), st.text(), st.text(), st.none() | st.integers(NOW + 1, 2**64 - 1))
def test_any_principal(kind: str, name: str, method: str, expires_at: int | None) -> None:
    principal = Principal(type=kind, name=name, method=method)
    if expires_at is not None:
        principal.expires_at_unix_ms = expires_at
    assert unseal(seal(principal, KEY), KEY) == principal


def test_the_mac_is_bound_to_its_use() -> None:
    sealed = SealedPrincipal.FromString(seal(ALICE, KEY))
    plain = hmac.digest(KEY, sealed.principal, hashlib.sha256)
    assert sealed.mac != plain
    sealed.mac = plain
    assert broken(sealed.SerializeToString()) == "forged"


def test_the_key_is_not_inside() -> None:
    assert KEY not in seal(ALICE, KEY)


# ---- expiry (what it forbids: test_envelope)


def test_the_end_is_under_the_seal() -> None:
    assert expiry_unix_ms(unseal(seal(ALICE, KEY), KEY)) == NOW + 1000


def test_an_end_of_zero_is_an_end() -> None:
    assert expiry_unix_ms(Principal(name="a", expires_at_unix_ms=0)) == 0


def test_without_an_end_it_holds() -> None:
    assert expiry_unix_ms(unseal(seal(FOR_EVER, KEY), KEY)) > 2**70


# ---- forgeries


def test_another_key() -> None:
    assert broken(seal(ALICE, OTHER_KEY)) == "forged"
    assert broken(seal(ALICE, KEY), key=OTHER_KEY) == "forged"


def test_another_principal_under_the_same_mac() -> None:
    alice = SealedPrincipal.FromString(seal(ALICE, KEY))
    forged = SealedPrincipal(principal=BOB.SerializeToString(), mac=alice.mac)
    assert broken(forged.SerializeToString()) == "forged"


def test_a_later_expiry_under_the_same_mac() -> None:
    alice = SealedPrincipal.FromString(seal(ALICE, KEY))
    for longer in (FOR_EVER, Principal(type="User", name="alice", method="token", expires_at_unix_ms=NOW + 2000)):
        forged = SealedPrincipal(principal=longer.SerializeToString(), mac=alice.mac)
        assert broken(forged.SerializeToString()) == "forged"


@pytest.mark.parametrize("mac", [b"", b"\0", bytes(32), bytes(31), bytes(33)])
def test_a_mac_that_is_none(mac: bytes) -> None:
    assert broken(SealedPrincipal(principal=ALICE.SerializeToString(), mac=mac).SerializeToString()) == "forged"


def test_part_of_the_mac_is_not_enough() -> None:
    sealed = SealedPrincipal.FromString(seal(ALICE, KEY))
    for size in range(32):
        part = SealedPrincipal(principal=sealed.principal, mac=sealed.mac[:size])
        assert broken(part.SerializeToString()) == "forged"
    more = SealedPrincipal(principal=sealed.principal, mac=sealed.mac + b"\0")
    assert broken(more.SerializeToString()) == "forged"


def test_an_unsealed_principal() -> None:
    assert broken(ALICE.SerializeToString()) in {"malformed", "forged"}
    assert broken(SealedPrincipal(principal=ALICE.SerializeToString()).SerializeToString()) == "forged"


@pytest.mark.parametrize("field", [b"\x1a", b"\x0a\x01x\x1a"], ids=["unknown", "repeated"])
def test_a_seal_with_more_bytes_than_were_sealed_is_malformed(field: bytes) -> None:
    """Security: a field beside the two has no MAC; with it a captured forwarder could fill a lookup worker's cache."""
    larger = field + varint(1000) + bytes(1000) + seal(ALICE, KEY)
    assert SealedPrincipal.FromString(larger).principal == ALICE.SerializeToString()
    assert broken(larger) == "malformed"


def test_a_seal_of_the_largest_principal_holds() -> None:
    largest = Principal(type="User", name="角" * 1024, proxy="角" * 1024, method="m" * 100_000)
    assert unseal(seal(largest, KEY), KEY) == largest


def test_nothing_at_all() -> None:
    assert broken(b"") == "forged"


def test_every_bit_of_every_byte_counts() -> None:
    sealed = seal(ALICE, KEY)
    for position in range(len(sealed)):
        for bit in range(8):
            flipped = bytearray(sealed)
            flipped[position] ^= 1 << bit
            assert broken(bytes(flipped)) in {"malformed", "forged"}


def test_every_truncation() -> None:
    sealed = seal(ALICE, KEY)
    for size in range(len(sealed)):
        assert broken(sealed[:size]) in {"malformed", "forged"}


@pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\x7f", b"\x08\x96\x01\x0a"])
def test_garbage(garbage: bytes) -> None:
    assert broken(garbage) in {"malformed", "forged"}


@given(st.binary(max_size=200))
def test_no_random_bytes_are_a_principal(data: bytes) -> None:
    broken(data)


# ---- keys


def test_the_length_of_keys() -> None:
    assert SEAL_KEY_BYTES == 32


@pytest.mark.parametrize("key", [b"", b"k", bytes(31), bytes(33)], ids=len)
def test_a_key_of_another_length_is_our_defect(key: bytes) -> None:
    """An empty key above all: any process could seal with it."""
    with pytest.raises(ValueError, match="32"):
        seal(ALICE, key)
    with pytest.raises(ValueError, match="32"):
        unseal(seal(ALICE, KEY), key)
