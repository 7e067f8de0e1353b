"""The small parts of the embedded engine by themselves."""

from __future__ import annotations

import gc
import pickle
import socket
import threading

import pytest

from gc_sidecar.embedded.by_value import FunctionByValue
from gc_sidecar.embedded.channels import Channel, ChannelClosed
from gc_sidecar.embedded.heap import Heap
from gc_sidecar.embedded.lockstep import Lockstep
from gc_sidecar.embedded.scheduler import Request, Scheduler
from gc_sidecar_agent.plugin import _forward_function
from tests.sidecar_process import wait_for


def test_a_function_travels_by_value() -> None:
    factor = 3

    def times(value: int, plus: int = 1) -> int:
        return value * factor + plus

    assert pickle.loads(pickle.dumps(FunctionByValue.of(times))).build()(5) == 16
    with pytest.raises(TypeError):
        FunctionByValue.of(len)


def test_the_agent_s_own_function_does() -> None:
    forward = pickle.loads(pickle.dumps(FunctionByValue.of(_forward_function()))).build()
    reply = forward(object(), "no_such_method", {"operation_id": "one"})
    assert reply["outcome"]["code"] == "no_agent"


def test_a_channel_brings_messages_whole_and_says_when_the_other_end_is_gone() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    big = ["x" * 1_000_000, {"a": 1}]
    sender = threading.Thread(target=theirs.send, args=(big,))
    sender.start()
    assert ours.receive() == big
    sender.join()
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.socket.close()
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send("anybody?")


def test_a_heap_keeps_what_it_should_and_makes_cycles_of_the_rest() -> None:
    heap = Heap(retain=10, garbage=6, lifetime=2)
    heap.fill(100)
    assert heap.retained_objects == 100
    gc.collect()
    for _ in range(5):
        heap.step()
    assert heap.retained_objects == 150
    # Of five steps' cycles the last two's are in use.
    assert gc.collect() == 18
    assert gc.collect() == 0


def test_requests_beyond_the_limit_wait_for_their_turn() -> None:
    scheduler = Scheduler(max_running=1)
    scheduler.add(Request("a", 0, 1))
    scheduler.add(Request("b", 1, 2))
    scheduler.add(Request("c", 0, 1))
    scheduler.schedule()
    assert scheduler.counts == (1, 2)
    (token,) = scheduler.update()[0]
    assert (token.request_id, token.finish_reason) == ("a", "length")
    scheduler.schedule()
    assert scheduler.update()[1][0].finish_reason is None
    scheduler.abort("c")
    assert scheduler.update()[1][0].finish_reason == "length"
    assert not scheduler.has_unfinished_requests()


def test_ranks_meet_at_the_end_of_each_step_and_agree_when_to_rest() -> None:
    left_end, right_end = socket.socketpair()
    woken = threading.Event()
    left = Lockstep([Channel(left_end)], on_start=lambda: None)
    right = Lockstep([Channel(right_end)], on_start=woken.set)
    left.start()
    assert woken.wait(5.0)
    assert right.is_started()
    right.start()
    answers: list[bool] = []
    meeting = threading.Thread(target=lambda: answers.append(left.finish(True)))
    meeting.start()
    assert right.finish(False), "the other one has more"
    meeting.join(5.0)
    assert answers == [True]
    meeting = threading.Thread(target=lambda: answers.append(left.finish(False)))
    meeting.start()
    assert not right.finish(False)
    meeting.join(5.0)
    assert answers == [True, False]
    assert not right.is_started()
    left_end.shutdown(socket.SHUT_RDWR)
    wait_for("the loss is noticed", right.is_started)
    with pytest.raises((RuntimeError, ChannelClosed)):
        right.finish(True)
