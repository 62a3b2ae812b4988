"""The controller's end of the control socket, turned by hand: who is answered, who is put out, what comes back."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket

import pytest

from pytools.errors import RefusedError
from steering.control import requests, server
from steering.control.server import ControlServer


class Served:
    """A server in a selector of its own, which answers whatever `answer` says."""

    def __init__(self, path):
        self.path, self.asked = path, []
        self.answer = lambda _: requests.Reply(lines=["done"])
        self.server = ControlServer(path, self._answered)
        self.selector = selectors.DefaultSelector()
        self.server.register(self.selector)

    def _answered(self, request, asker):
        self.asked.append((request, asker))
        return self.answer(request)

    def close(self):
        self.server.close()
        self.selector.close()

    def turn(self):
        for key, events in self.selector.select(0):
            key.data(events)

    @contextlib.contextmanager
    def client(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.settimeout(20)
            one.connect(str(self.path))
            self.turn()
            yield one

    def exchange(self, data):
        with self.client() as one:
            one.send(data)
            self.turn()
            return requests.decode_reply(one.recv(1 << 20))

    def ask(self, request):
        return self.exchange(requests.encode(request))


@pytest.fixture
def served(tmp_path):
    found = Served(tmp_path / requests.SOCKET)
    yield found
    found.close()


def raising(error):
    def answer(_):
        raise error

    return answer


def test_a_request_is_answered_and_the_kernel_says_who_asked(served):
    assert served.ask(requests.Status()) == requests.Reply(lines=["done"])
    assert served.asked == [(requests.Status(), server.Peer(os.getpid(), os.geteuid()))]
    assert served.path.stat().st_mode & 0o777 == 0o600


def test_a_dead_controllers_socket_is_replaced_and_ours_is_removed(tmp_path):
    path = tmp_path / requests.SOCKET
    path.touch()
    served = Served(path)
    assert served.ask(requests.Status()).code == 0
    served.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RefusedError("no", "wait"), 4, "no"),
        (OSError(28, "No space left on device", "journal"), 1, "journal: No space"),
    ],
)
def test_an_error_is_a_reply_and_the_server_lives(served, error, code, said):
    served.answer = raising(error)
    reply = served.ask(requests.Undo())
    assert reply.code == code and reply.lines[0].startswith(said)
    served.answer = lambda _: requests.Reply()
    assert served.ask(requests.Undo()).code == 0


def test_an_endless_refusal_arrives_all_the_same(served):
    served.answer = raising(RefusedError("x" * 500_000, "y" * 500_000))
    reply = served.ask(requests.Undo())
    assert reply.code == 4 and reply.lines[0].startswith("xxx") and reply.next_step.startswith("yyy")


def test_rubbish_is_answered_and_counted(served):
    for rubbish in (b"\0", b"{}", b"x" * (requests.MOST_BYTES + 1)):
        assert served.exchange(rubbish).code == 2
    assert served.server.counts["malformed"] == 3 and served.asked == []


def test_another_user_is_shown_out(served, monkeypatch):
    monkeypatch.setattr(server, "peer", lambda _: (1, os.geteuid() + 4242, 0))
    with served.client() as stranger:
        assert stranger.recv(1) == b""
    assert served.server.counts["strangers"] == 1 and served.asked == []


def test_who_is_silent_is_put_out_when_others_come(served, monkeypatch):
    monkeypatch.setattr(server, "_MOST_CLIENTS", 2)
    with served.client() as first, served.client(), served.client():
        assert first.recv(1) == b""
        assert served.server.counts["put_out"] == 1


def test_who_hangs_up_at_once_costs_nothing(served):
    with served.client() as one:
        one.send(requests.encode(requests.Status()))
    served.turn()
    assert len(served.asked) == 1, "it was asked, and nobody was there for the answer"
    assert served.ask(requests.Status()).code == 0
