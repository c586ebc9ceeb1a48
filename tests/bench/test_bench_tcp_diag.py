"""What the kernel says of a server's connections."""

import socket

import pytest

from tests.bench.tcp_diag import received_bytes


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_bytes_that_a_server_has_received(family: socket.AddressFamily) -> None:
    """Of all its connections, with IPv4 at a socket for both, as Java opens it; of no other server's."""
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family is socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert received_bytes(port) == 0
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        accepted = [server.accept()[0] for _ in clients]
        for client, ours in zip(clients, accepted, strict=True):
            client.sendall(b"x" * 1000)
            ours.sendall(b"answer")
            received = b""
            while len(received) < 1000:
                received += ours.recv(1000)
        assert received_bytes(port) == 2000
        for end in (*clients, *accepted):
            end.close()
        assert received_bytes(port) == 0
