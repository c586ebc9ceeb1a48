"""proxy.supervisor.startup.sockets: bound once, with an error that names the key; a folder of this user alone."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.supervisor.startup.sockets import RuntimeDirectory, StartFailed, bind_tcp


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_bind(port: int) -> None:
    with bind_tcp("listener[0].bind", f"127.0.0.1:{port}") as sock:
        assert sock.getsockname() == ("127.0.0.1", port)
        assert not sock.getblocking()
        assert not os.get_inheritable(sock.fileno())
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0, "bound, but no client may come yet"


def test_bind_ipv6(port: int) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with bind_tcp("admin.bind", f"[::1]:{port}") as sock:
        assert sock.getsockname()[:2] == ("::1", port)


def test_a_port_in_use_names_the_key(port: int) -> None:
    in_use = rf"listener\[1\]\.bind: cannot bind 127\.0\.0\.1:{port}: Address already"
    with bind_tcp("listener[0].bind", f"127.0.0.1:{port}") as sock:
        sock.listen()
        with pytest.raises(StartFailed, match=in_use):
            bind_tcp("listener[1].bind", f"127.0.0.1:{port}")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(StartFailed, match=r"admin\.bind: cannot bind 192\.0\.2\.1:6650"):
        bind_tcp("admin.bind", "192.0.2.1:6650")


@pytest.mark.parametrize(
    ("number", "port", "advice"),
    [
        (errno.EADDRINUSE, 6650, "Address already in use; `ss -ltnp 'sport = :6650'` says by which process"),
        (errno.EADDRNOTAVAIL, 6650, "Cannot assign requested address; this machine has no such address"),
        (errno.EACCES, 443, "Permission denied; ports below 1024 are root's: take a higher one, "),
        (errno.EACCES, 1024, "Permission denied"),
        (errno.EMFILE, 443, "Too many open files"),
    ],
)
def test_a_bind_error_names_the_key_the_address_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, number: int, port: int, advice: str
) -> None:
    def refuse(_self: socket.socket, _address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(StartFailed) as caught:
        bind_tcp("admin.bind", f"127.0.0.1:{port}")
    text = str(caught.value)
    assert text.startswith(f"admin.bind: cannot bind 127.0.0.1:{port}: {advice}")
    assert text.endswith(advice) or port == 443


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StartFailed, match=r"admin\.bind: cannot bind nowhere:6650: Name or service"):
        bind_tcp("admin.bind", "nowhere:6650")


# ---- the folder


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory(str(tmp_path / "a" / "run"))
    yield directory
    directory.remove_sockets()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_made_for_this_user_alone(directory: RuntimeDirectory) -> None:
    assert mode(directory.path) == 0o700


def test_a_folder_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    """Security."""
    tmp_path.chmod(0o755)
    directory = RuntimeDirectory(str(tmp_path))
    assert mode(tmp_path) == 0o700
    directory.remove_sockets()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: its owner could replace the sockets."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(StartFailed, match="belongs to another user"):
        RuntimeDirectory(str(tmp_path))


def test_nothing_is_written_in_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security: its owner could have put a link there, to a file that only we may write."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "supervisor.lock").symlink_to(victim)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(StartFailed, match="belongs to another user"):
        RuntimeDirectory(str(folder))
    assert victim.read_text() == "precious"


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Security: what it leads to is not ours to change."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (tmp_path / "run").symlink_to(elsewhere)
    with pytest.raises(StartFailed, match="is not a folder"):
        RuntimeDirectory(str(tmp_path / "run"))
    assert mode(elsewhere) == 0o755
    assert list(elsewhere.iterdir()) == []


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("shared", [0o777, 0o1777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_refused_with_what_they_put_there(
    tmp_path: Path, victim: Path, shared: int
) -> None:
    """Security: the link was put there by another user, the file is one that only we may write."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "supervisor.lock").symlink_to(victim)
    folder.chmod(shared)
    with pytest.raises(StartFailed, match=rf"run can be written by other users \(mode {shared:04o}\).*chmod go-w"):
        RuntimeDirectory(str(folder))
    assert (victim.read_text(), mode(folder)) == ("precious", shared)


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path, victim: Path) -> None:
    """Security: it may be there from a time when others could write in the folder."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "supervisor.lock").symlink_to(victim)
    with pytest.raises(StartFailed, match=r"supervisor\.lock: is a link; remove it"):
        RuntimeDirectory(str(folder))
    assert victim.read_text() == "precious"


def test_the_lock_files_content_stays(tmp_path: Path) -> None:
    (tmp_path / "supervisor.lock").write_text("notes")
    RuntimeDirectory(str(tmp_path)).remove_sockets()
    assert (tmp_path / "supervisor.lock").read_text() == "notes"


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "supervisor.lock")
    with pytest.raises(StartFailed, match=r"supervisor\.lock: is no file of this user's"):
        RuntimeDirectory(str(tmp_path))


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_any_user_could_replace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """Security: but for the root of a volume, as that of Kubernetes' emptyDir, which is the pod's alone."""
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    folder = parent / "run"
    if exists:
        folder.mkdir(mode=0o700)
    with pytest.raises(StartFailed, match=r"run could be replaced by any user: .*open has mode 0777; .*chmod \+t"):
        RuntimeDirectory(str(folder))
    assert folder.exists() == exists
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda path: path == parent)
        RuntimeDirectory(str(folder)).remove_sockets()
    parent.chmod(0o1777)
    RuntimeDirectory(str(folder)).remove_sockets()


def test_a_folder_that_is_replaced_by_a_link_loses_nothing_elsewhere(tmp_path: Path) -> None:
    """Security."""
    directory = RuntimeDirectory(str(tmp_path / "run"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("auth-0.sock", "theirs.sock"):
        (elsewhere / name).touch()
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").symlink_to(elsewhere)
    with pytest.raises(StartFailed):
        directory.bind_socket("auth-0.sock")
    directory.remove_sockets()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["auth-0.sock", "theirs.sock"]


def test_a_link_in_place_of_a_socket_is_replaced_and_not_followed(directory: RuntimeDirectory, victim: Path) -> None:
    """Security."""
    (directory.path / "auth-0.sock").symlink_to(victim)
    with directory.bind_socket("auth-0.sock"):
        assert (directory.path / "auth-0.sock").is_socket()
    assert victim.read_text() == "precious"


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "supervisor.lock").mkdir()
    with pytest.raises(StartFailed, match=r"cluster\.runtime_dir: .*supervisor\.lock: "):
        RuntimeDirectory(str(tmp_path))


def test_a_socket_that_cannot_be_bound(directory: RuntimeDirectory) -> None:
    (directory.path / "auth-0.sock").mkdir()
    with pytest.raises(StartFailed, match=r"cluster\.runtime_dir: .*auth-0\.sock: "):
        directory.bind_socket("auth-0.sock")
    (directory.path / "auth-0.sock").rmdir()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(StartFailed, match=r"cluster\.runtime_dir: .*run is not a folder"):
        RuntimeDirectory(str(tmp_path / "run"))


def test_a_runtime_directory_in_use_refuses_a_second_cluster(directory: RuntimeDirectory) -> None:
    with pytest.raises(StartFailed, match="another cluster is running in"):
        RuntimeDirectory(str(directory.path))


def test_a_folder_that_an_earlier_program_left(directory: RuntimeDirectory) -> None:
    """After an upgrade it is this process's already, and no other process could have it in between."""
    inherited = os.dup(directory.lock_fd)
    directory.remove_sockets()
    (directory.path / "lookup-0.sock").touch()
    again = RuntimeDirectory(str(directory.path), inherited)
    assert again.lock_fd == inherited
    assert (directory.path / "lookup-0.sock").exists(), "the sockets in it are in use"
    with pytest.raises(StartFailed, match="another cluster is running in"):
        RuntimeDirectory(str(directory.path))
    again.remove_sockets()
    RuntimeDirectory(str(directory.path)).remove_sockets()


def test_after_one_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        directory = RuntimeDirectory(str(tmp_path))
        directory.bind_socket("x.sock").close()
        directory.remove_sockets()
        assert not list(tmp_path.glob("*.sock"))


def test_unix_sockets(directory: RuntimeDirectory) -> None:
    (directory.path / "auth-0.sock").touch()  # left there by an earlier run
    with directory.bind_socket("auth-0.sock") as sock, socket.socket(socket.AF_UNIX) as client:
        assert sock.getsockname() == str(directory.path / "auth-0.sock")
        assert not sock.getblocking()
        assert not os.get_inheritable(sock.fileno())
        client.connect(sock.getsockname())
