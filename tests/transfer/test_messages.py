"""Control messages come back as they were sent, and nothing else is read.

Tags such as B53 are explained in `tests/INVARIANTS.md`.
"""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import TransferError
from specdec.transfer.address import ProcessRecord
from specdec.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Ask,
    Destination,
    Done,
    Drained,
    Failed,
    Heartbeat,
    Hello,
    Message,
    PoolFacts,
    Progress,
    Refused,
    Start,
    Unknown,
    Welcome,
    clip,
    decode,
    encode,
    start_digest,
)

NAMES: dict[str, Any] = {"transfer_id": 3, "decode_epoch": "d" * 32, "prefill_epoch": "p" * 32}
FACTS = PoolFacts(target="t" * 32, draft=None, page_size=64, kv_format="fp8", model="m" * 32, memory="cpu")
DESTINATION = Destination(
    facts=FACTS, tp_size=2, dcp_size=2, num_pages=9, page_ids=bytes(16), addresses=[b"one", b"another"]
)
MESSAGES: list[Message] = [
    Hello(protocol=1, epoch="d" * 32, transport="local", facts=FACTS),
    Welcome(epoch="p" * 32, processes=[ProcessRecord(host="here", pid=7, start_time=0)]),
    Refused(reason="so"),
    Heartbeat(),
    Start(
        **NAMES,
        token_ids=bytes(12),
        num_cached=0,
        cache_salt=bytes(16),
        priority=-1,
        destination=DESTINATION,
        deadline_s=2.5,
    ),
    Abort(**NAMES),
    Ask(**NAMES),
    Progress(**NAMES, num_computed=5),
    Done(**NAMES, start_digest=bytes(16), num_tokens={"target.latent": 3}, hidden=bytes(8), num_cached=0),
    Failed(**NAMES, reason="so", is_retryable=True),
    Drained(**NAMES),
    Unknown(**NAMES),
]
WRONG: dict[str, list[Any]] = {  # what no field of that name takes, beside values of other types
    "transfer_id": [-1, 1 << 40],
    "decode_epoch": ["short", "x" * 65],
    "prefill_epoch": ["short", "x" * 65],
    "epoch": ["", "x" * 65],
    "host": ["x" * 257],
    "pid": [0, -1, 1 << 32],
    "start_time": [-1],
    "processes": [["text"], [None]],
    "deadline_s": [0.0, -1.0, 1e7, math.nan, math.inf],
    "protocol": [-1, 1 << 40],
    "num_cached": [-1, 1 << 40],
    "num_computed": [-1],
    "cache_salt": [bytes(65)],
    "priority": [1 << 31, -(1 << 31) - 1],
    "reason": ["x" * 4097],
    "start_digest": [b"", bytes(15), bytes(17)],
    "num_tokens": [{"target.latent": -1}, {1: 1}, {"target.latent": 1.5}],
    "page_size": [0, -1, 1 << 20],
    "tp_size": [0, -1, 4097],
    "dcp_size": [0, -1, 4097],
    "num_pages": [0, -1, (1 << 32) + 1],
    "addresses": [["text"], [b"one", None]],
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert decode(encode(message)) == message


def fields_of(value: Any) -> dict[str, Any]:
    """A message as the map it travels as."""
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return fields


def variants(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every map that differs from a message's in one field, at any depth, so that it is none."""
    found = [("one more field", {**fields, "another": 1})]
    for name, value in fields.items():
        rest = {key: other for key, other in fields.items() if key != name}
        found.append((f"{name} missing", rest))
        if isinstance(value, dict) and name in ("facts", "destination"):
            found += [(f"{name}: {what}", {**rest, name: inner}) for what, inner in variants(value)]
        allowed = {type(value)} | {float: {int}, bytes: {str}}.get(type(value), set())  # base64 may stand for bytes
        allowed |= {str, type(None)} if name == "draft" else set()
        kinds = (None, True, 7, 2.5, "text", b"bytes", [1], {"a": 1})
        wrong_values = [kind for kind in kinds if type(kind) not in allowed] + WRONG.get(name, [])
        found += [(f"{name} = {wrong!r}", {**rest, name: wrong}) for wrong in wrong_values]
    return found


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_field_that_is_missing_unknown_of_another_type_or_out_of_range_is_refused(message: Message) -> None:
    accepted = []
    for what, fields in variants(fields_of(message)):
        try:
            decode(msgspec.msgpack.encode(fields))
        except TransferError:
            continue
        accepted.append(what)
    assert accepted == []


def test_a_kind_that_does_not_exist_is_refused() -> None:
    for kind in ("Goodbye", "hello", "", 1, None, "PoolFacts", "Destination", "Transfer"):
        with pytest.raises(TransferError):
            decode(msgspec.msgpack.encode({"type": kind}))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_as_such(data: bytes) -> None:
    """B53: whatever arrives, the error is one that ends this line and no thread."""
    with pytest.raises(TransferError):
        decode(data)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_refused_or_is_another_message(message: Message, data: st.DataObject) -> None:
    """B53: no damage gives anything but a message or the error."""
    whole = encode(message)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    for given_bytes in (whole[:place], bytes(damaged), whole + b"\0", whole[place:]):
        try:
            read = decode(given_bytes)
        except TransferError:
            continue
        assert decode(encode(read)) == read


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81\xa4type\x91"])
def test_nesting_without_end_is_refused(opening: bytes) -> None:
    """B53: a reader that calls itself must not run out of stack."""
    with pytest.raises(TransferError):
        decode(opening + b"\x91" * 200_000)


def test_a_message_too_large_to_be_read_is_not_sent() -> None:
    start = msgspec.structs.replace(MESSAGES[4], token_ids=bytes(MAX_MESSAGE_BYTES))
    with pytest.raises(TransferError, match="too long for a hand-off"):
        encode(start)


def test_any_reason_fits_once_it_is_clipped() -> None:
    reason = "é" * 5000
    assert decode(encode(Refused(reason=clip(reason)))) == Refused(reason="é" * 4000 + "...")
    assert clip("short") == "short"


def test_the_digest_of_a_start_tells_all_that_was_asked_apart() -> None:
    """B52: what a prefill delivers is compared with what it was asked for."""
    tokens = np.arange(5, dtype=np.int32).tobytes()
    other_facts = msgspec.structs.replace(FACTS, page_size=32)
    digests = {
        start_digest(tokens, num_cached=0, cache_salt=b"", destination=DESTINATION),
        start_digest(tokens[4:], num_cached=0, cache_salt=b"", destination=DESTINATION),
        start_digest(tokens, num_cached=64, cache_salt=b"", destination=DESTINATION),
        start_digest(tokens, num_cached=0, cache_salt=b"salt", destination=DESTINATION),
        *(
            start_digest(
                tokens,
                num_cached=0,
                cache_salt=b"",
                destination=msgspec.structs.replace(DESTINATION, **{name: value}),
            )
            for name, value in (
                ("page_ids", bytes(8)),
                ("addresses", [b"another", b"one"]),
                ("dcp_size", 1),
                ("num_pages", 10),
                ("facts", other_facts),
            )
        ),
    }
    assert len(digests) == 9
    assert start_digest(tokens, num_cached=0, cache_salt=b"", destination=DESTINATION) in digests
