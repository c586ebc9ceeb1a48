"""The receiver as a process: killed under load, told to end under load, on a disk that is full."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from receiver_process import ReceiverProcess, Sender, end_all
from receiver_requests import CONTENT_TYPES, body, compressed, http_request, named

from analytics.remote_write import remote_pb2 as pb
from analytics.remote_write.decode import Decoder
from analytics.spool import reader, retention
from analytics.spool.writer import SpoolLimits, SpoolWriter

TS = 1_760_000_000_000


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    end_all()


def request(number: int, series: int = 20) -> tuple[bytes, dict[str, str]]:
    """A request whose samples all have its number as their value; 1.0 and 2.0 by turns."""
    version = 1 + number % 2
    made = [named(f"m{one}", (TS, float(number), 0)) for one in range(series)]
    return body(version, made), {"Content-Type": CONTENT_TYPES[version], "Content-Encoding": "snappy"}


def write_config(directory: Path, spool: Path, more: str = "") -> Path:
    path = directory / "receiver.toml"
    path.write_text(
        f'[listen]\nbind = "127.0.0.1:0"\n[admin]\nbind = "127.0.0.1:0"\n{more}\n'
        f'[spool]\ndirectory = "{spool}"\nsegment_bytes_max = 65536\nfree_bytes_min = 0\n'
    )
    return path


def numbers(spool: Path) -> Counter[int]:
    """How often each request is in the spool; each must be whole."""
    found: Counter[int] = Counter()
    for segment in reader.list_segments(spool):
        for record in reader.read_records(segment.path, 0, segment.size_bytes):
            decoder = Decoder()
            decoder.add_body(record.body, record.version)
            values = decoder.take_columns().sample_value.tolist()
            assert len(set(values)) == 1
            assert record.version == 1 + int(values[0]) % 2
            found[int(values[0])] += 1
    return found


def mend(spool: Path) -> None:
    SpoolWriter(spool, SpoolLimits(65536, 10**9, 0)).close()


def check(found: Counter[int], senders: list[Sender]) -> None:
    """Every request answered with 2xx is there: once if it was sent once, else as often as it was sent at most."""
    for sender in senders:
        for number in sender.acknowledged:
            assert 1 <= found[number] <= sender.attempts[number], number
    sent = set(itertools.chain.from_iterable(sender.attempts for sender in senders))
    assert set(found) <= sent


def wait_until_acknowledged(senders: list[Sender], more: int) -> None:
    """Wait for real processes on real disks; there is no clock to jump."""
    goal = sum(len(sender.acknowledged) for sender in senders) + more
    deadline = time.monotonic() + 60
    while sum(len(sender.acknowledged) for sender in senders) < goal:
        assert time.monotonic() < deadline, "the receiver does not get on"
        senders[0].stop.wait(0.005)


def stop(senders: list[Sender]) -> None:
    for sender in senders:
        sender.stop.set()
    for sender in senders:
        sender.join(30)
        assert not sender.is_alive()


def test_killed_under_load_nothing_is_lost_that_was_answered(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    config = write_config(tmp_path, spool)
    receiver = ReceiverProcess(config)
    where = [receiver.write]
    senders = [Sender(lambda: where[0], request, 8, first) for first in range(8)]
    for sender in senders:
        sender.start()
    for life in range(4):
        wait_until_acknowledged(senders, 40 + 13 * life)
        assert receiver.stop(signal.SIGKILL) == -signal.SIGKILL
        receiver = ReceiverProcess(config)
        where[0] = receiver.write
    wait_until_acknowledged(senders, 30)
    receiver.stop(signal.SIGKILL)
    stop(senders)
    mend(spool)
    found = numbers(spool)
    check(found, senders)
    once = [number for sender in senders for number in sender.acknowledged if sender.attempts[number] == 1]
    assert len(once) > 150
    assert all(found[number] == 1 for number in once)
    assert len(reader.list_segments(spool)) >= 5


def test_told_to_end_under_load_it_answers_what_is_there(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    receiver = ReceiverProcess(write_config(tmp_path, spool))
    senders = [Sender(lambda: receiver.write, request, 4, first) for first in range(4)]
    for sender in senders:
        sender.start()
    wait_until_acknowledged(senders, 50)
    assert receiver.page("/readyz") == (200, "ready\n")
    assert receiver.stop() == 0
    stop(senders)
    check(numbers(spool), senders)
    assert receiver.log[-1]["event"] == "the receiver has ended; all acknowledged requests are on the disk"
    assert all(entry["level"] != "error" for entry in receiver.log)


def test_told_to_end_within_a_request_it_takes_and_answers_it(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    receiver = ReceiverProcess(write_config(tmp_path, spool))
    host, _, port = receiver.write.rpartition(":")
    whole = http_request(1, request(0)[0])
    with (
        socket.create_connection((host, int(port)), 30) as busy,
        socket.create_connection((host, int(port)), 30) as idle,
    ):
        busy.sendall(whole[:-10])
        idle.sendall(whole)
        assert idle.recv(1000).startswith(b"HTTP/1.1 204")
        os.kill(receiver.process.pid, signal.SIGTERM)
        assert idle.recv(1000) == b""  # from then on it takes no new request
        busy.sendall(whole[-10:])
        answer = busy.recv(1000)
        assert answer.startswith(b"HTTP/1.1 204")
        assert b"Connection: close" in answer
    assert receiver.stop(0) == 0
    assert numbers(spool) == Counter({0: 2})


def test_metrics_of_a_running_receiver_equal_what_was_sent(tmp_path: Path) -> None:
    receiver = ReceiverProcess(write_config(tmp_path, tmp_path / "spool"))
    connection = http.client.HTTPConnection(receiver.write, timeout=30)
    for number in range(10):
        data, headers = request(number)
        connection.request("POST", "/api/v1/write", data, headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (204, b"")
        if number % 2:
            assert answer.headers["X-Prometheus-Remote-Write-Samples-Written"] == "20"
    _, text = receiver.page("/metrics")
    for version in "12":
        assert f'pulsar_proxy_analytics_receiver_samples_total{{version="{version}"}} 100.0' in text
        assert f'pulsar_proxy_analytics_receiver_requests_total{{code="204",version="{version}"}} 5.0' in text
    assert "pulsar_proxy_analytics_receiver_connections 1.0" in text
    assert "process_cpu_seconds_total" in text
    connection.close()
    assert receiver.stop() == 0


# ---- requests made to hurt


def message(number: int, content: bytes) -> bytes:
    """A field of protobuf whose value has a length."""
    size, length = len(content), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


NAME = message(1, message(1, b"__name__") + message(2, b"m"))


def histogram_of(buckets: int) -> bytes:
    """A 1.0 request with one histogram that has, and says that it has, this many buckets."""
    made = pb.Histogram(sum=0, timestamp=TS, positive_deltas=[0] * buckets)
    made.positive_spans.add(length=buckets)
    return message(1, NAME + message(4, made.SerializeToString()))


ATTACKS: dict[str, tuple[int, Callable[[], bytes], str]] = {
    "33 KiB of empty histograms": (1, lambda: message(1, NAME + b"\x22\x00" * 9_000) * 38, "limits.max_histograms"),
    "a histogram of 4 M buckets": (1, lambda: histogram_of(4_000_000), "limits.max_buckets_per_histogram"),
    "a histogram of 1 M buckets": (1, lambda: histogram_of(1_000_000), "limits.max_buckets_per_histogram"),
    "16 M empty series": (1, lambda: b"\x0a\x00" * 16_000_000, "limits.max_series"),
    "15 M empty symbols": (2, lambda: b"\x22\x00" * 15_000_000 + b"\x2a\x00", "limits.max_symbols"),
    "15 M labels": (2, lambda: message(5, message(1, b"\x01\x02" * 15_000_000)), "limits.max_fields"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_malicious_request_costs_little_and_stops_no_other(tmp_path: Path, attack: str) -> None:
    """While it is sent again and again others are answered, between two of its answers; memory stays what it was."""
    version, make, key = ATTACKS[attack]
    receiver = ReceiverProcess(write_config(tmp_path, tmp_path / "spool"))
    bad = compressed(make()), {"Content-Type": CONTENT_TYPES[version], "Content-Encoding": "snappy"}
    good = Sender(lambda: receiver.write, request, 1, 0)
    good.start()
    wait_until_acknowledged([good], 20)
    peak_before = peak_bytes(receiver.process.pid)
    connection = http.client.HTTPConnection(receiver.write, timeout=120)
    sent = meanwhile = 0
    at_once = "buckets" in attack
    while sent < 3 or (meanwhile < 2 and not at_once):
        before = len(good.acknowledged)
        connection.request("POST", "/api/v1/write", *bad)
        answer = connection.getresponse()
        assert (answer.status, key in answer.read().decode()) == (400, True)
        sent += 1
        # Behind a large one there would be one answer at most; on a slow disk there may be none, so try again.
        meanwhile = max(meanwhile, len(good.acknowledged) - before)
        assert sent < 100, "others wait behind it"
        assert receiver.page("/healthz") == (200, "ok\n")
    connection.close()
    assert peak_bytes(receiver.process.pid) - peak_before < 400 * 1024 * 1024
    wait_until_acknowledged([good], 20)
    stop([good])
    _, text = receiver.page("/metrics")
    bound = key.removeprefix("limits.max_")
    assert f'pulsar_proxy_analytics_receiver_beyond_bounds_total{{bound="{bound}"}} {sent}.0' in text
    assert receiver.stop() == 0
    check(numbers(tmp_path / "spool"), [good])
    told = [entry for entry in receiver.log if entry["event"] == "refused a request"]
    assert {entry["sender"] for entry in told} == {"127.0.0.1"}
    assert all(len(str(entry)) < 1000 for entry in told)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"])
def test_silent_connections_keep_no_probe_and_no_sender_out(tmp_path: Path, sent: bytes) -> None:
    config = write_config(tmp_path, tmp_path / "spool", "[limits]\nmax_connections = 32\n")
    receiver = ReceiverProcess(config)
    data, headers = request(0)
    with ExitStack() as silent:
        for where in (receiver.admin, receiver.write):
            host, _, port = where.rpartition(":")
            for _ in range(40):
                one = silent.enter_context(socket.create_connection((host, int(port)), 30))
                one.sendall(sent)
        assert receiver.page("/healthz") == (200, "ok\n")
        connection = http.client.HTTPConnection(receiver.write, timeout=30)
        connection.request("POST", "/api/v1/write", data, headers)
        assert connection.getresponse().status == 204
        connection.close()
        _, text = receiver.page("/metrics")
        assert "pulsar_proxy_analytics_receiver_connections_displaced_total 9.0" in text
        assert "pulsar_proxy_analytics_receiver_connections_refused_total 0.0" in text
    assert receiver.stop() == 0


def test_a_body_in_chunks_of_two_bytes_is_refused(tmp_path: Path) -> None:
    """To parse the million chunks of 2 MB takes seconds, and others would wait."""
    receiver = ReceiverProcess(write_config(tmp_path, tmp_path / "spool"))
    head = http_request(2, b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    host, _, port = receiver.write.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as slow:
        sending = threading.Thread(target=send_until_closed, args=(slow, head + b"2\r\nxx\r\n" * 1_000_000))
        sending.start()
        answer = slow.recv(1000)
        sending.join()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"too many chunks" in answer
    _, text = receiver.page("/metrics")
    assert 'rejected_requests_total{reason="malformed"} 1.0' in text
    assert receiver.stop() == 0


def send_until_closed(stream: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        stream.sendall(data)


def peak_bytes(process_id: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# ---- no room


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of a megabyte, of our own."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def can_mount() -> bool:
    """Root in a container often cannot; the other disk is tried everywhere."""
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
    )


@contextmanager
def plain(directory: Path) -> Iterator[Path]:
    directory.mkdir()
    yield directory


# The kernel refuses to let a file of this process grow beyond this: partly written, then EFBIG.
FILE_SIZE_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))"


def post_until(receiver: ReceiverProcess, status: int, first: int, most: int) -> list[int]:
    """Post until an answer has this status; returns the numbers of those answered with success."""
    written = []
    connection = http.client.HTTPConnection(receiver.write, timeout=30)
    for number in range(first, first + most):
        data, headers = request(number, series=1000)
        connection.request("POST", "/api/v1/write", data, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status == status:
            connection.close()
            if status == 503:
                assert int(answer.headers["Retry-After"]) > 0
            return written
        assert answer.status == 204
        written.append(number)
    raise AssertionError(f"no {status} among {most} answers")


@pytest.mark.parametrize("disk", ["file size limit", *(["tmpfs"] if can_mount() else [])])
def test_a_disk_without_room(tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):  # its data would exceed the limit, too
        monkeypatch.delenv(name, raising=False)
    place, prepare = (small_disk, "") if disk == "tmpfs" else (plain, FILE_SIZE_LIMIT)
    with place(tmp_path / "disk") as directory:
        spool = directory / "spool"
        receiver = ReceiverProcess(write_config(tmp_path, spool), prepare)
        written = post_until(receiver, 503, 0, 1000)
        assert written
        assert sorted(numbers(spool)) == written
        _, text = receiver.page("/metrics")
        assert 'rejected_requests_total{reason="full"} 1.0' in text or 'reason="failed"} 1.0' in text
        assert retention.remove_consumed(spool, reader.committed_end(spool)) or disk != "tmpfs"
        again = post_until_some(receiver, len(written) + 1)
        assert set(again) <= set(numbers(spool))
        assert receiver.stop() == 0
        assert set(again) <= set(numbers(spool))


def post_until_some(receiver: ReceiverProcess, first: int) -> list[int]:
    """Room is there again: one request at least gets through, after a refusal at most."""
    for start in (first, first + 1):
        connection = http.client.HTTPConnection(receiver.write, timeout=30)
        data, headers = request(start, series=1000)
        connection.request("POST", "/api/v1/write", data, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status == 204:
            return [start]
    raise AssertionError("there is room, and it is refused")


# ---- starts that fail


@pytest.mark.parametrize("case", ["unknown key", "address taken", "spool taken", "spool is a file"])
def test_a_start_that_fails_says_why_in_one_line(tmp_path: Path, case: str) -> None:
    spool = tmp_path / "spool"
    config = write_config(tmp_path, spool, "[limits]\nmax_conections = 5\n" if case == "unknown key" else "")
    other = None
    if case in {"address taken", "spool taken"}:
        other = ReceiverProcess(write_config(tmp_path, spool))
    said = {
        "unknown key": "limits.max_conections: there is no such key; did you mean",
        "address taken": "listen.bind: ",
        "spool taken": "another receiver writes to this spool",
        "spool is a file": "spool.directory: ",
    }[case]
    if case == "address taken":
        assert other is not None
        text = config.read_text().replace(str(spool), f"{spool}2").replace("127.0.0.1:0", other.write, 1)
        config.write_text(text)
    if case == "spool is a file":
        spool.write_text("")
    program = "from analytics.receiver.command import receive; receive()"
    result = subprocess.run(
        [sys.executable, "-c", program, "--config", config], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    if other is not None:
        assert other.stop() == 0
