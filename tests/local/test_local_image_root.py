"""The root of the proxy's image: what is taken of Debian's packages, and the rules that a built one is checked by."""

import hashlib
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from image import debian_root, python_application
from local import image_check

from tests.local.conftest import FakeCommand


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("usr/bin/python3.13", True),
        ("usr/lib/x86_64-linux-gnu/libc.so.6", True),
        ("usr/lib/python3.13/ssl.py", True),
        ("usr/lib/python3.13/lib-dynload/_ssl.cpython-313-x86_64-linux-gnu.so", True),
        ("usr/lib/python3.13/lib-dynload/_ctypes.cpython-313-aarch64-linux-gnu.so", True),
        ("usr/share/doc/libssl3t64/copyright", True),
        ("lib64", True),
        ("usr/bin/perl", False),
        ("usr/sbin/update-ca-certificates", False),
        ("usr/share/doc/libssl3t64/changelog.gz", False),
        ("usr/lib/x86_64-linux-gnu/gconv/IBM1399.so", False),
        ("usr/lib/python3.13/lib-dynload/_ctypes_test.cpython-313-x86_64-linux-gnu.so", False),
        ("usr/lib/python3.13/lib-dynload/_sqlite3.cpython-313-x86_64-linux-gnu.so", False),
        ("usr/lib/python3.13/ensurepip/__init__.py", False),
        ("etc/skel/.bashrc", False),
        ("var/lib/dpkg/status", False),
    ],
)
def test_only_what_the_proxy_needs_is_taken_of_a_package(path: str, kept: bool) -> None:
    assert debian_root.is_kept(path) is kept


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root made of one package, with an authority, a shell and a maintainer script."""
    source = tmp_path / "source"
    files = {
        "DEBIAN/control": "Package: small\nVersion: 1:2.3+b1\nArchitecture: all\nMaintainer: N <n@n>\nDescription: d\n",
        "DEBIAN/postinst": f"#!/bin/sh\ntouch {tmp_path}/ran\n",
        "usr/bin/sh": "",
        "usr/lib/os-release": 'NAME="Debian"\nVERSION_ID="13"\n',
        "usr/share/ca-certificates/mozilla/B.crt": "second\n",
        "usr/share/ca-certificates/mozilla/A.crt": "first\n",
        "etc/os-release": "",
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "DEBIAN/postinst").chmod(0o755)
    (source / "usr/lib/python3.13").mkdir()
    (source / "usr/bin/python3.13").touch()
    package = tmp_path / "small_2.3_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", source, package], check=True, capture_output=True)
    debian_root.unpack([package], tmp_path / "root")
    debian_root.finish(tmp_path / "root")
    return tmp_path / "root"


def test_packages_are_unpacked_and_not_installed(root: Path) -> None:
    assert not (root / "usr/bin/sh").exists()
    assert not (root.parent / "ran").exists()
    assert (root / "usr/bin/python3").resolve() == root / "usr/bin/python3.13"
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert "10001:10001:" in (root / "etc/passwd").read_text()


def test_the_authorities_are_the_packages_own(root: Path) -> None:
    """Not those of the machine that builds, which may trust a gateway of its own."""
    assert (root / "etc/ssl/certs/ca-certificates.crt").read_text() == "first\nsecond\n"
    assert os.readlink(root / "usr/lib/ssl/cert.pem") == "/etc/ssl/certs/ca-certificates.crt"


def test_debians_packages_are_in_the_bill_of_materials(root: Path) -> None:
    (component,) = python_application.debian_components(root)
    assert (component["name"], component["version"]) == ("small", "1:2.3+b1")
    assert component["purl"] == "pkg:deb/debian/small@1%3A2.3%2Bb1?arch=all&distro=debian-13"
    (package,) = root.parent.glob("*.deb")
    assert component["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(package.read_bytes()).hexdigest()}]


def test_a_library_that_no_package_brings_is_named(tmp_path: Path, fake_command: FakeCommand) -> None:
    fake_command("readelf", "echo ' 0x1 (NEEDED)  Shared library: [libgone.so.1]'")
    root = tmp_path / "root"
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/lib/module.so").write_bytes(b"\x7fELF...")
    (root / "usr/lib/text.py").write_bytes(b"import os")
    assert list(debian_root.libraries_missing(root)) == ["/usr/lib/module.so needs libgone.so.1"]
    (root / "usr/lib/libgone.so.1").touch()
    assert list(debian_root.libraries_missing(root)) == []


@pytest.mark.parametrize(("architecture", "machine"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_wheels_are_chosen_for_the_target(architecture: str, machine: str) -> None:
    options = python_application.platform_options(architecture)
    platforms = [option for option in options if option.startswith("--platform=")]
    assert platforms
    assert all(platform.endswith(f"_{machine}") for platform in platforms)


@pytest.mark.parametrize("requirements", ["proxy", "analytics"])
def test_nothing_is_installed_but_what_is_listed_with_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirements: str
) -> None:
    for name in ("dist/tree.whl", f"wheels-{requirements}/without-wheels.tar.gz"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!{tmp_path}/tools/bin/python3\n")
    calls: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        assert check
        calls.append(command[1:])
        if command[1] == "install":
            packages = Path(command[command.index("--target") + 1])
            (packages / "share/man").mkdir(parents=True)
            (packages / "bin").mkdir()
            (packages / "bin/tool").write_text(f"#!{tmp_path}/tools/bin/python3\n")

    monkeypatch.setattr(python_application, "WORK", tmp_path)
    monkeypatch.setattr(python_application, "TOOLS", tmp_path / "tools/bin")
    monkeypatch.setattr(subprocess, "run", run)
    root = tmp_path / "made"
    python_application.install("app", requirements, "arm64", root, "/usr/bin/python3")
    assert [call[0] for call in calls] == ["download", "wheel", "install"]
    download, wheel, install = calls
    assert {"--no-deps", "--require-hashes", "--no-build-isolation"} <= set(download)
    assert {"--no-deps", "--no-index", "--no-build-isolation"} <= set(wheel)
    assert {"--no-index", "--only-binary=:all:"} <= set(install)
    assert install[-1] == f"{tmp_path}/dist/tree.whl" + ("" if requirements == "proxy" else "[analytics]")
    assert (root / "opt/app/bin/tool").read_text() == "#!/opt/app/bin/python3\n"
    assert (root / "opt/app/share/man").is_dir()
    assert os.readlink(root / "opt/app/bin/python3") == "/usr/bin/python3"
    assert "home = /usr/bin\n" in (root / "opt/app/pyvenv.cfg").read_text()


def test_the_packages_are_of_one_python() -> None:
    """The build's Python compiles the bytecode, the image's reads it."""
    base = (Path(debian_root.__file__).parent / "Dockerfile").read_text()
    assert f"library/python:{debian_root.PYTHON}-slim" in base
    assert f"python{debian_root.PYTHON}-minimal" in debian_root.PACKAGES
    assert {"usr/bin/python3", f"usr/bin/python{debian_root.PYTHON}"} == image_check.PROGRAMS
    assert f"{debian_root.USER_ID}:{debian_root.USER_ID}" == image_check.USER


# ---- the rules for a built image


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Path]:
    """A root that keeps all rules."""
    umask = os.umask(0o022)
    root = tmp_path / "image"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3.13").write_text("")
    (root / "usr/bin/python3").symlink_to("python3.13")
    (root / "bin").symlink_to("usr/bin")
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "opt").mkdir()
    (root / "opt/python3").symlink_to("/usr/bin/python3.13")
    for path in root.rglob("*"):
        if not path.is_symlink() and path.name != "tmp":
            path.chmod(0o755)
    yield root
    os.umask(umask)


def test_a_good_image_has_no_problems(good: Path) -> None:
    assert list(image_check.problems(good)) == []


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        (0o4755, "setuid or setgid"),
        (0o2755, "setuid or setgid"),
        (0o750, "user 10001:10001 cannot read it"),
        (0o666, "all users can write it"),
    ],
)
def test_a_files_mode_is_checked(good: Path, mode: int, problem: str) -> None:
    (good / "opt/file").touch()
    (good / "opt/file").chmod(mode)
    assert list(image_check.problems(good)) == [f"/opt/file: {problem}"]


def test_a_folder_that_the_user_cannot_enter_is_a_problem(good: Path) -> None:
    (good / "opt").chmod(0o744)
    assert list(image_check.problems(good)) == ["/opt: user 10001:10001 cannot read it"]


@pytest.mark.parametrize("program", ["usr/bin/perl", "usr/bin/sh", "usr/local/bin/apt", "sbin/dpkg"])
def test_other_programs_are_a_problem(good: Path, program: str) -> None:
    (good / program).parent.mkdir(parents=True, exist_ok=True)
    (good / program).touch()
    assert list(image_check.problems(good)) == [f"/{program}: does not belong in the image"]


@pytest.mark.parametrize("target", ["/nowhere", "nowhere"])
def test_a_link_to_nothing_is_a_problem(good: Path, target: str) -> None:
    (good / "opt/link").symlink_to(target)
    assert list(image_check.problems(good)) == ["/opt/link: links to nothing"]


def test_the_size_is_checked(good: Path) -> None:
    with (good / "opt/large").open("wb") as file:
        file.truncate(image_check.BYTES_MAX + 1)
    (good / "opt/large").chmod(0o644)
    assert list(image_check.problems(good)) == ["120000001 bytes unpacked, more than 120000000"]


def test_the_group_of_a_handshake_is_checked() -> None:
    """Run here as in the image: only an OpenSSL that has the group passes."""
    result = subprocess.run([sys.executable, "-c", image_check.POST_QUANTUM], capture_output=True, text=True)
    if ssl.OPENSSL_VERSION_INFO >= (3, 5):
        assert result.returncode == 0, result.stderr
    else:
        assert f"AssertionError: not X25519MLKEM768: {ssl.OPENSSL_VERSION}" in result.stderr
