"""A gate lets writes in while it is open, and tells its owner of those that are in."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest

from specdec.errors import TransferError
from specdec.transfer.address import GateRecord, ProcessRecord
from specdec.transfer.gate import Gate, GateVisit


@pytest.fixture
def gate() -> Gate:
    return Gate()


def visit(gate: Gate) -> GateVisit:
    return GateVisit(ProcessRecord.of_this_process(), gate.record)


def test_a_visit_counts_as_mapped_and_as_written_between_enter_and_leave(gate: Gate) -> None:
    assert (gate.is_mapped, gate.is_written) == (False, False)
    first, second = visit(gate), visit(gate)
    assert (gate.is_mapped, gate.is_written) == (True, False)
    first.enter()
    second.enter()
    assert gate.is_written
    first.leave()
    assert gate.is_written
    second.leave()
    assert not gate.is_written
    first.close()
    assert gate.is_mapped
    second.close()
    assert not gate.is_mapped


def test_nobody_enters_a_gate_that_was_shut_and_who_is_in_stays_in(gate: Gate) -> None:
    early, late = visit(gate), visit(gate)
    record = gate.record
    early.enter()
    gate.shut()
    with pytest.raises(TransferError, match="was closed"):
        late.enter()
    assert (early.is_shut, gate.is_written) == (True, True)
    early.leave()
    assert not gate.is_written
    with pytest.raises(TransferError):
        GateVisit(ProcessRecord.of_this_process(), record)


def test_a_gate_that_is_another_file_by_now_is_refused(gate: Gate) -> None:
    record = GateRecord(fd=Gate().record.fd, token=gate.record.token)
    with pytest.raises(TransferError):
        GateVisit(ProcessRecord.of_this_process(), record)


def stand_in_gate(record: GateRecord, process: ProcessRecord, pipe: Connection) -> None:
    inside = GateVisit(process, record)
    inside.enter()
    pipe.send("in")
    pipe.recv()


def test_a_process_that_is_killed_in_a_gate_leaves_it(gate: Gate) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=stand_in_gate, args=(gate.record, ProcessRecord.of_this_process(), child))
    process.start()
    assert pipe.recv() == "in"
    gate.shut()
    assert (gate.is_mapped, gate.is_written) == (True, True)
    process.kill()
    process.join()
    assert (gate.is_mapped, gate.is_written) == (False, False)
