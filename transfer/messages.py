"""What decode and prefill tell each other about a hand-off, and how it is written.

    decode                                   prefill
    Hello    who I am, protocol     ->
                                    <-       Welcome   who I am, or Refused
    Start    prompt, destination    ->
                                    <-       Progress  computed so far, as often as it moves
                                    <-       Done      everything is written; the last hidden state
                                    <-       Failed    it is not, and why
    Abort                           ->
                                    <-       Drained   nothing writes to these pages any more
    Ask      what of this one?      ->                 answered with what holds, or Unknown

Every message about a transfer names it and both epochs. An epoch is drawn when a process starts, so what an
earlier process at the same address said, or was told, is recognised as stale. Messages are msgpack, tagged; unknown or
missing fields are errors, and the protocol version changes with any of them.
"""

import hashlib
from typing import Annotated, Any

import msgspec

from specdec.kernels.errors import TransferError
from specdec.transfer.address import ProcessRecord

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 1 << 26  # a prompt of a million tokens takes 4 MB

Epoch = Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]
NumRanks = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
NumPages = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]  # of a rank; no offset of a byte can overflow
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Salt = Annotated[bytes, msgspec.Meta(max_length=64)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Message(_Record, frozen=True, kw_only=True, tag=True):
    pass


class PoolFacts(_Record, frozen=True, kw_only=True):
    """What both sides must agree on before a byte of a pool is moved.

    Attributes:
        target: Fingerprint of the target's layout.
        draft: Fingerprint of the draft's layout and weights; None where there is no draft.
        page_size: Tokens of a page.
        kv_format: Storage format.
        model: Fingerprint of the weights and of what else a value of the target's KV depends on.
        memory: Where the pools lie, "cpu" or "cuda"; nothing is copied from one to the other.
    """

    target: Text
    draft: Text | None
    page_size: Size
    kv_format: Text
    model: Text
    memory: Text


class Hello(_Message, frozen=True, kw_only=True):
    """First words of a decode group.

    Attributes:
        protocol: Version of these messages.
        epoch: Of the decode group.
        transport: What it receives through.
        facts: Of its pools.
    """

    protocol: Count
    epoch: Epoch
    transport: Text
    facts: PoolFacts


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer of a prefill that can serve the group.

    Attributes:
        epoch: Of the prefill.
        processes: All that may write for it.
    """

    epoch: Epoch
    processes: list[ProcessRecord]


class Refused(_Message, frozen=True, kw_only=True):
    """Answer of a prefill that cannot, and of either side to what it cannot read; it hangs up."""

    reason: Text


class Heartbeat(_Message, frozen=True, kw_only=True):
    """The sender is alive."""


class Transfer(_Message, frozen=True, kw_only=True):
    """Names a transfer.

    Attributes:
        transfer_id: Drawn by the decode group, never again in its epoch.
        decode_epoch: Its epoch.
        prefill_epoch: That of the prefill it was given to.
    """

    transfer_id: Count
    decode_epoch: Epoch
    prefill_epoch: Epoch


class Destination(_Record, frozen=True, kw_only=True):
    """Where the KV of one prompt goes: the geometry and memory of the decode group.

    Attributes:
        facts: Of its pools.
        tp_size: Its ranks.
        dcp_size: Ranks of these that share the target pages.
        num_pages: Physical target pages of a rank.
        page_ids: Pages of the prompt from its first token on, i64 in the byte order of this machine.
        addresses: Of every rank, for the transport.
    """

    facts: PoolFacts
    tp_size: NumRanks
    dcp_size: NumRanks
    num_pages: NumPages
    page_ids: bytes
    addresses: list[bytes]


class Start(Transfer, frozen=True, kw_only=True):
    """Compute a prompt and write its KV.

    Attributes:
        token_ids: The known tokens, i32 in the byte order of this machine.
        num_cached: Leading tokens whose pages the decode group holds already, the same on all its ranks.
        cache_salt: Its pages may be shared with prompts of the same one only; empty for those without.
        priority: A lower number is computed first.
        destination: Where it goes.
        deadline_s: Seconds after which the decode group gives it up.
    """

    token_ids: bytes
    num_cached: Count
    cache_salt: Salt
    priority: Priority
    destination: Destination
    deadline_s: Annotated[float, msgspec.Meta(gt=0, lt=1e7)]


class Abort(Transfer, frozen=True, kw_only=True):
    """Write nothing more, and say when nothing is being written."""


class Ask(Transfer, frozen=True, kw_only=True):
    """What of this transfer?"""


class Progress(Transfer, frozen=True, kw_only=True):
    """It goes on.

    Attributes:
        num_computed: Leading tokens of the prompt whose KV is computed.
    """

    num_computed: Count


class Done(Transfer, frozen=True, kw_only=True):
    """Everything has arrived.

    Attributes:
        start_digest: `start_digest` of what it was told in `Start`.
        num_tokens: Tokens by kind of entry, as in {"target.latent": 17}.
        hidden: The hidden state of the last token after the final norm, f32.
        num_cached: Tokens whose KV the prefill held already.
    """

    start_digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    num_tokens: dict[Text, Count]
    hidden: bytes
    num_cached: Count


class Failed(Transfer, frozen=True, kw_only=True):
    """It has failed; `Drained` follows, unless something of it may still arrive.

    Attributes:
        reason: Why.
        is_retryable: Whether another prefill may do better.
    """

    reason: Text
    is_retryable: bool


class Drained(Transfer, frozen=True, kw_only=True):
    """Nothing of it can arrive any more: its pages may be used again."""


class Unknown(Transfer, frozen=True, kw_only=True):
    """No such transfer was started here: nothing of it can arrive."""


Message = (
    Hello | Welcome | Refused | Heartbeat | Start | Abort | Ask | Progress | Done | Failed | Drained | Unknown
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Write a message.

    Raises:
        TransferError: It is too large to be read.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransferError(
            f"a {type(message).__name__} message takes {len(data)} bytes, at most {MAX_MESSAGE_BYTES} can be sent: "
            "the prompt is too long for a hand-off"
        )
    return data


def decode(data: bytes) -> Message:
    """Read a message.

    Raises:
        TransferError: It is none of ours, or its fields are not what they must be.
    """
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(
            f"a control message cannot be read: {error}; both sides must run the same version of specdec"
        ) from None
    return message


def start_digest(token_ids: bytes, *, num_cached: int, cache_salt: bytes, destination: Destination) -> bytes:
    """Digest what a `Start` asks for: 16 bytes."""
    asked = _encoder.encode((token_ids, num_cached, cache_salt, destination))
    return hashlib.blake2b(asked, digest_size=16).digest()


def clip(text: str) -> str:
    """Shorten a reason to what a message holds."""
    return text if len(text) <= 4000 else text[:4000] + "..."
