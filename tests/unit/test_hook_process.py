"""One call of a hook against far ends on loopback: HTTPS, an API server, a scontrol, programs; hostile ones, too."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading

import pytest
import support

from pytools.errors import SwerveError
from steering.acting import hook_calls, hook_files, hook_process
from steering.acting.hook_settings import Settings

PYTHON = "/usr/bin/python3"  # root's own, unlike that of the tests
FIRING = {
    "schema": 1,
    "id": "18a-c0ffee",
    "status": "firing",
    "repeat": 0,
    "host": "h1",
    "rule": "dead",
    "because": 'p50 6.3 ms × "3" µs; $(reboot)\n`x`',
    "path": {"name": "h1>h2 dev rail1"},
}
AGAIN = FIRING | {"repeat": 1}
RESOLVED = FIRING | {"status": "resolved"}


def deliver(kind, options, event=FIRING, timeout_s=5.0):
    return hook_process.deliver({"kind": kind, "options": options, "event": event, "timeout_s": timeout_s})


def process(kind, options, event=FIRING, timeout_s=20.0):
    """The same as the controller makes it: in a process of its own."""
    hook = Settings("noc", kind, json.dumps(options), 10**9, int(timeout_s * 1e9), 3, 30, 10**9)
    return hook_calls.call(hook, event)


# ---- HTTP ----


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Certificate and key of 127.0.0.1, which is its own authority."""
    support.require("openssl")
    folder = tmp_path_factory.mktemp("authority")
    folder.chmod(0o700)
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    names = ["-keyout", folder / "key.pem", "-out", folder / "ca.pem", "-addext", "subjectAltName=IP:127.0.0.1"]
    support.run(["openssl", *words.split(), *names])
    return folder


class Far(http.server.ThreadingHTTPServer):
    """A server on loopback; `answer` makes status, headers and body of a request."""

    def __init__(self, answer, authority=None):
        self.heard = []
        super().__init__(("127.0.0.1", 0), self._handler(answer))
        if authority is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(authority / "ca.pem", authority / "key.pem")
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if authority else ''}://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that goes away is what is tested."""

    def _handler(self, answer):
        far = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                far.heard.append((self.command, self.path, dict(self.headers), body))
                status, headers, said = answer(self.command, self.path, dict(self.headers), body)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(said)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_):
                pass

        for method in ("GET", "POST", "PATCH"):
            setattr(Handler, f"do_{method}", Handler.any)
        return Handler


@contextlib.contextmanager
def far_end(answer=lambda *_: (204, {}, b""), authority=None):
    with Far(answer, authority) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def secret(tmp_path):
    tmp_path.chmod(0o700)
    file = tmp_path / "secret"
    file.write_text("Bearer abc\n")
    file.chmod(0o600)
    return file


def test_an_event_is_posted_over_tls_with_the_secret(authority, secret):
    with far_end(authority=authority) as far:
        options = {"url": f"{far.url}/a?b=c", "ca_file": str(authority / "ca.pem"), "secret_header": "X-Key"}
        assert process("webhook", options | {"secret_file": str(secret)}) == "it answered 204"
    [(method, path, headers, body)] = far.heard
    assert (method, path, headers["X-Key"]) == ("POST", "/a?b=c", "Bearer abc")
    assert headers["Content-Type"] == "application/json" and json.loads(body) == FIRING


def test_a_server_that_is_not_trusted_hears_nothing(authority, secret):
    with far_end(authority=authority) as far, pytest.raises(SwerveError, match="certificate is not accepted"):
        deliver("webhook", {"url": far.url, "secret_file": str(secret), "secret_header": "Authorization"})
    assert far.heard == []


def test_the_name_of_the_server_must_be_in_its_certificate(authority):
    with far_end(authority=authority) as far, pytest.raises(SwerveError, match="certificate is not accepted"):
        url = far.url.replace("127.0.0.1", "localhost")
        deliver("webhook", {"url": url, "ca_file": str(authority / "ca.pem")})


def test_a_secret_that_others_may_read_is_not_sent(secret):
    secret.chmod(0o640)
    with far_end() as far, pytest.raises(SwerveError, match="others may read it"):
        deliver("webhook", {"url": far.url, "secret_file": str(secret), "secret_header": "Authorization"})
    assert far.heard == []


def test_a_secret_makes_one_header(secret):
    secret.write_text("a\r\nX-Other: b")
    with pytest.raises(SwerveError, match="expected one line"):
        hook_files.secret(str(secret))


@pytest.mark.parametrize("status", [302, 307])
def test_redirects_are_not_followed(status):
    refused = pytest.raises(SwerveError, match="redirects are not followed")
    with far_end() as other, far_end(lambda *_: (status, {"Location": other.url}, b"")) as far, refused:
        deliver("webhook", {"url": far.url})
    assert len(far.heard) == 1 and other.heard == []


@pytest.mark.parametrize("status", [400, 404, 500])
def test_only_two_hundreds_count_as_received(status):
    with far_end(lambda *_: (status, {}, b"no")) as far, pytest.raises(SwerveError, match=f"it answered {status}$"):
        deliver("webhook", {"url": far.url})


@contextlib.contextmanager
def peer(serve):
    """A server that does what it is told with its first connection, and then waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def run():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)
                    over.wait()

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()


def drips(connection):
    """A byte now and then, which no time limit of a socket ends."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"y")
        threading.Event().wait(0.05)


@pytest.mark.parametrize("serve", [lambda _: None, drips], ids=["says nothing", "never ends"])
def test_a_peer_that_does_not_answer_is_given_up(serve):
    with peer(serve) as url, pytest.raises(SwerveError, match=r"killed|timed out"):
        process("webhook", {"url": url}, timeout_s=1.0)


@pytest.mark.parametrize(
    "said", [b"\0\1\2\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500, b"HTTP/1.1 " + b"9" * 70_000]
)
def test_what_is_no_http_is_no_answer(said):
    def serve(connection):
        connection.recv(1 << 16)
        with contextlib.suppress(OSError):
            connection.sendall(said + b"\r\n")
            connection.shutdown(socket.SHUT_WR)

    with peer(serve) as url, pytest.raises(SwerveError):
        deliver("webhook", {"url": url})


def test_an_endless_answer_is_refused(monkeypatch):
    monkeypatch.setattr(hook_process, "_REPLY_BYTES", 1000)
    with far_end(lambda *_: (200, {}, b"x" * 5000)) as far, pytest.raises(SwerveError, match="longer than 1000"):
        deliver("webhook", {"url": far.url})


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SwerveError, match="refused"):
        deliver("webhook", {"url": f"http://127.0.0.1:{port}"})


# ---- Kubernetes ----


class Cluster:
    """A node, and an API server's ways with it: versions, a list of taints as a whole, conditions merged by type."""

    def __init__(self, taints=(), conditions=()):
        self.version, self.taints, self.conditions = 7, list(taints), list(conditions)
        self.meanwhile = lambda: None  # what others do between our GET and our PATCH

    def __call__(self, method, path, headers, body):
        if headers.get("Authorization") != "Bearer token":
            return 401, {}, b'{"message": "who are you?"}'
        base, _, status = path.partition("/nodes/h1")
        if base != "/api/v1":
            return 404, {}, b"{}"
        if method == "GET":
            found = self._node()
            self.meanwhile()
            return found
        patch = json.loads(body)
        if status == "/status":
            assert headers["Content-Type"] == "application/strategic-merge-patch+json"
            for each in patch["status"]["conditions"]:
                self.conditions = [old for old in self.conditions if old["type"] != each["type"]]
                self.conditions += [each] if each.get("$patch") != "delete" else []
        else:
            assert headers["Content-Type"] == "application/merge-patch+json"
            if patch["metadata"]["resourceVersion"] != str(self.version):
                return 409, {}, b'{"message": "the object has been modified"}'
            self.taints = patch["spec"]["taints"]
        self.version += 1
        return self._node()

    def _node(self):
        node = {
            "metadata": {"name": "h1", "resourceVersion": str(self.version)},
            "spec": {"taints": self.taints} if self.taints else {},
            "status": {"conditions": self.conditions},
        }
        return 200, {}, json.dumps(node).encode()


OTHERS = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


@pytest.fixture
def kubernetes(authority, tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "token").write_text("token")
    (tmp_path / "token").chmod(0o644)

    @contextlib.contextmanager
    def served(cluster, **options):
        with far_end(cluster, authority) as far:
            common = {"server": far.url, "token_file": str(tmp_path / "token"), "ca_file": str(authority / "ca.pem")}
            yield lambda event: deliver("kubernetes", common | options, event)

    return served


TAINT = {"taint": {"key": "swerve/degraded", "effect": "NoSchedule"}}


def test_a_taint_comes_and_goes_beside_those_of_others(kubernetes):
    cluster = Cluster([OTHERS])
    with kubernetes(cluster, **TAINT) as tell:
        assert tell(FIRING) == "taint swerve/degraded:NoSchedule is set"
        [others, ours] = cluster.taints
        assert others == OTHERS and (ours["key"], ours["value"]) == ("swerve/degraded", "swerve")
        assert tell(FIRING) == tell(AGAIN) == "taint swerve/degraded:NoSchedule is there"
        assert tell(RESOLVED) == "taint swerve/degraded:NoSchedule is removed"
        assert cluster.taints == [OTHERS] and cluster.version == 9
        assert "left alone" in tell(RESOLVED) and cluster.version == 9


def test_a_taint_of_somebody_else_is_left_alone(kubernetes):
    theirs = TAINT["taint"] | {"value": "by-hand"}
    cluster = Cluster([theirs])
    with kubernetes(cluster, **TAINT) as tell:
        assert "not ours" in tell(FIRING) and "left alone" in tell(RESOLVED)
    assert cluster.taints == [theirs]


def test_a_taint_that_somebody_removed_is_not_set_again(kubernetes):
    cluster = Cluster()
    with kubernetes(cluster, **TAINT) as tell:
        assert "removed by somebody" in tell(AGAIN)
    assert cluster.taints == []


def test_what_others_change_meanwhile_is_not_lost(kubernetes):
    cluster = Cluster()

    def add():
        cluster.meanwhile = lambda: None
        cluster.taints, cluster.version = [OTHERS], cluster.version + 1

    cluster.meanwhile = add
    with kubernetes(cluster, **TAINT) as tell:
        tell(FIRING)
    assert [each["key"] for each in cluster.taints] == ["gpu", "swerve/degraded"]


def test_a_node_that_never_stands_still_is_a_failure(kubernetes):
    cluster = Cluster()

    def touch():
        cluster.version += 1

    cluster.meanwhile = touch
    with kubernetes(cluster, **TAINT) as tell, pytest.raises(SwerveError, match="changed by others"):
        tell(FIRING)


def test_a_condition_is_true_refreshed_and_removed(kubernetes):
    cluster = Cluster(conditions=[READY])
    with kubernetes(cluster, condition="NetworkDegraded") as tell:
        assert tell(FIRING) == "condition NetworkDegraded is set"
        first = cluster.conditions[1]
        assert (first["status"], first["reason"]) == ("True", "Swerve") and "dead" in first["message"]
        first["lastTransitionTime"] = first["lastHeartbeatTime"] = "2020-01-01T00:00:00Z"
        tell(AGAIN)
        again = cluster.conditions[1]
        assert again["lastTransitionTime"] == "2020-01-01T00:00:00Z" != again["lastHeartbeatTime"]
        tell(RESOLVED)
        assert cluster.conditions == [READY]
        assert "left alone" in tell(RESOLVED)
        assert "removed by somebody" in tell(AGAIN)


def test_a_condition_of_somebody_else_is_left_alone(kubernetes):
    theirs = {"type": "NetworkDegraded", "status": "False", "reason": "Detector"}
    cluster = Cluster(conditions=[theirs])
    with kubernetes(cluster, condition="NetworkDegraded") as tell:
        assert "not ours" in tell(FIRING) and "not ours" in tell(RESOLVED)
    assert cluster.conditions == [theirs]


@pytest.mark.parametrize(
    "said", [b"", b"[]", b"{}", b"[" * 100_000, b'{"metadata": {"resourceVersion": 5}, "spec": 3}']
)
def test_a_forged_node_changes_nothing(kubernetes, said):
    refused = pytest.raises(SwerveError, match=r"not a JSON object|resourceVersion")
    with kubernetes(lambda method, *_: (200 if method == "GET" else 500, {}, said), **TAINT) as tell, refused:
        tell(FIRING)


def test_a_refusal_is_told_in_the_servers_words(kubernetes, tmp_path):
    (tmp_path / "token").write_text("stale")
    with kubernetes(Cluster(), **TAINT) as tell, pytest.raises(SwerveError, match="401: who are you"):
        tell(FIRING)


def test_the_server_of_a_pod_is_known_from_its_environment(monkeypatch, kubernetes):
    cluster = Cluster()
    with kubernetes(cluster, **TAINT, server=None) as tell:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        with pytest.raises(SwerveError, match="KUBERNETES_SERVICE_HOST is not set"):
            tell(FIRING)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
        assert hook_process._server() == "https://[fd00::1]:443"


# ---- Slurm ----

SCONTROL = """\
#!{python}
# Stands for scontrol: keeps one node's state in a file, and records how it was called.
import json, pathlib, sys
file = pathlib.Path({state!r})
node = json.loads(file.read_text())
node["calls"].append(sys.argv[1:])
if sys.argv[1] == "show":
    reason = f"   Reason={{node['reason']}} [root@2026-11-26T10:00:00]\\n" if node["reason"] else ""
    print(f"NodeName={{sys.argv[3]}} CoresPerSocket=1\\n   State={{node['state']}} ThreadsPerCore=1\\n{{reason}}")
else:
    words = dict(each.split("=", 1) for each in sys.argv[2:])
    if words["State"] == "DRAIN":
        node["state"] += "+DRAIN"
        node["reason"] = words["Reason"]
    else:
        node["state"] = node["state"].removesuffix("+DRAIN")
        node["reason"] = ""
file.write_text(json.dumps(node))
"""


class Slurm:
    """A node of Slurm as a stand-in keeps it."""

    def __init__(self, folder, state="IDLE", reason=""):
        self._file = folder / "node.json"
        self.put(state, reason)
        self.scontrol = folder / "scontrol"
        self.scontrol.write_text(SCONTROL.format(python=PYTHON, state=str(self._file)))
        self.scontrol.chmod(0o755)

    def put(self, state, reason=""):
        self._file.write_text(json.dumps({"state": state, "reason": reason, "calls": []}))

    def tell(self, event):
        return deliver("slurm", {"scontrol": str(self.scontrol)}, event)

    @property
    def node(self):
        return json.loads(self._file.read_text())

    @property
    def state(self):
        return self.node["state"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(hook_files, "program_objection", lambda _: "")  # below /tmp, where everybody can write
    return Slurm(tmp_path)


def test_a_node_is_drained_with_the_reason_and_resumed(slurm):
    assert slurm.tell(FIRING) == "node h1 is drained"
    assert slurm.state == "IDLE+DRAIN"
    assert slurm.node["calls"][1][:3] == ["update", "NodeName=h1", "State=DRAIN"]
    reason = slurm.node["reason"]
    assert reason.startswith("swerve 18a-c0ffee: dead: h1>h2 dev rail1: p50 6.3 ms x ?3? us")
    assert reason.isascii() and reason.isprintable() and not set(reason) & set("\"'`\\")
    assert slurm.tell(FIRING) == slurm.tell(AGAIN) == "node h1 is drained"
    assert sum(call[0] == "update" for call in slurm.node["calls"]) == 1
    assert slurm.tell(RESOLVED) == "node h1 is resumed"
    assert (slurm.state, slurm.node["reason"]) == ("IDLE", "")


@pytest.mark.parametrize(
    ("state", "reason"), [("IDLE+DRAIN", "disk"), ("DOWN*", "Not responding"), ("MIXED+DRAIN", "not swerve 1: x")]
)
def test_a_node_that_others_took_out_is_left_alone(slurm, state, reason):
    slurm.put(state, reason)
    assert "left alone" in slurm.tell(FIRING) and "left alone" in slurm.tell(RESOLVED)
    assert (slurm.state, slurm.node["reason"]) == (state, reason)


def test_a_node_that_the_administrator_resumed_is_not_drained_again(slurm):
    assert "left alone" in slurm.tell(AGAIN) and slurm.state == "IDLE"


def test_a_node_that_went_down_meanwhile_is_not_called_well(slurm):
    slurm.tell(FIRING)
    slurm.put("DOWN*+DRAIN", slurm.node["reason"])
    slurm.tell(RESOLVED)
    assert slurm.node["calls"][-1] == ["update", "NodeName=h1", "State=UNDRAIN"]


def test_a_scontrol_that_fails_is_told_in_its_words(slurm):
    slurm.scontrol.write_text(f"#!{PYTHON}\nimport sys\nsys.exit('slurm_load_node error: Unable to contact')")
    with pytest.raises(SwerveError, match=r"show failed \(1\): slurm_load_node error"):
        slurm.tell(FIRING)


@pytest.mark.parametrize("said", ["", "Node h9 not found", "State=\nReason=swerve 1"])
def test_what_scontrol_never_says_drains_nothing(slurm, said):
    slurm.scontrol.write_text(f"#!{PYTHON}\nimport sys\nassert sys.argv[1] == 'show'\nprint({said!r})")
    with pytest.raises(SwerveError, match="shows no state"):
        slurm.tell(FIRING)


# ---- programs ----


def test_a_program_gets_the_event_and_a_clean_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    out = tmp_path / "out"
    code = (
        "import json,os,sys; "
        "json.dump([json.load(sys.stdin), dict(os.environ), os.getcwd(), sys.argv], open(sys.argv[1], 'w'))"
    )
    words = ["-c", code, str(out), "$(reboot); *"]
    assert process("exec", {"program": PYTHON, "arguments": words}) == "it ran"
    event, environment, folder, given = json.loads(out.read_text())
    assert event == FIRING and given[2] == "$(reboot); *" and folder == "/"
    assert {*environment} <= {"PATH", "LANG", "LC_CTYPE"}


def test_the_end_of_a_program_is_told():
    code = "import sys; print('x' * 200_000); sys.exit('no paper')"
    with pytest.raises(SwerveError, match=r"^it ended with 1: x+$"):
        deliver("exec", {"program": PYTHON, "arguments": ["-c", code]})


def test_a_program_that_reads_nothing_and_leaves_something_running_has_ended(tmp_path):
    code = f"import os; os.fork() or (open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())), os.pause())"
    code = code.replace("os.pause()", "__import__('signal').pause()")
    assert deliver("exec", {"program": PYTHON, "arguments": ["-c", code]}) == "it ran"
    pid = support.wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 10, "it runs")
    os.kill(int(pid), 9)


def test_a_program_that_never_ends_is_killed_with_what_it_started(tmp_path):
    file = tmp_path / "pids"
    code = (
        "import os,signal,sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); "
        "f = open(sys.argv[1], 'a'); print(os.getpid(), file=f, flush=True); signal.pause()"
    )
    with pytest.raises(SwerveError, match="killed"):
        process("exec", {"program": PYTHON, "arguments": ["-c", code, str(file)]}, timeout_s=1.0)
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2
    support.wait_until(lambda: not any(map(support.lives, pids)), 10, "both are dead")


def test_only_roots_own_programs_run(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    with pytest.raises(SwerveError, match=r"refused: /.* (is writable by others|belongs to user)"):
        deliver("exec", {"program": str(mine), "arguments": []})


def test_each_directory_and_link_on_the_way_to_a_program_counts(tmp_path, monkeypatch):
    modes = {}  # what lstat says of these, in place of the truth: tests have no root
    real = os.lstat

    def said(place):
        found = real(place)
        mode, uid = modes.get(str(place), (found.st_mode & ~0o022, 0))
        return os.stat_result((mode, *found[1:4], uid, *found[5:]))

    monkeypatch.setattr(hook_files.os, "lstat", said)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/program"
    program.write_text("")
    program.chmod(0o755)
    (tmp_path / "link").symlink_to("bin/../bin/program")
    for name in ("bin/program", "link"):
        assert hook_files.program_objection(str(tmp_path / name)) == ""
    for place in (tmp_path, tmp_path / "bin", program):
        kind = stat.S_IFMT(real(place).st_mode)
        for mode, uid, words in ((kind | 0o775, 0, "writable by others"), (kind | 0o755, 1, "belongs to user 1")):
            modes = {str(place): (mode, uid)}
            assert words in hook_files.program_objection(str(tmp_path / "link"))
    modes = {str(program): (stat.S_IFREG | 0o644, 0)}
    assert "is not a program" in hook_files.program_objection(str(program))
    modes = {str(tmp_path / "link"): (stat.S_IFLNK | 0o777, 1)}
    assert "belongs to user 1" in hook_files.program_objection(str(tmp_path / "link"))
    assert hook_files.program_objection(str(tmp_path / "none")).endswith("No such file or directory")
    (tmp_path / "ring").symlink_to("ring")
    assert "too many links" in hook_files.program_objection(str(tmp_path / "ring"))


def test_a_call_ends_with_whoever_made_it(tmp_path):
    """What a dead controller began to say must not arrive after what its successor says."""
    file = tmp_path / "pid"
    code = "import os,signal,sys; open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); signal.pause()"
    options = json.dumps({"program": PYTHON, "arguments": ["-c", code, str(file)]})
    caller = (
        "import sys; from steering.acting import hook_calls, hook_settings; "
        "hook = hook_settings.Settings('noc', 'exec', sys.argv[1], 1, 60 * 10**9, 1, 1, 1); "
        "hook_calls.call(hook, {'status': 'firing'})"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", caller, options]) as process:
        support.wait_until(lambda: file.exists() and file.read_text().endswith("\n"), 20, "the program runs")
        process.kill()
    support.wait_until(lambda: not support.lives(int(file.read_text())), 20, "it is dead, too")
